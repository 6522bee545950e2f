// Runs the steps of compiled graphs: views and allocations through torch's C shim, segments of kernels, products of
// matrices, and calls of Python functions for what is none of these. One library serves all graphs and every torch from
// 2.11 on: there are no headers, and the functions of torch come as a table of addresses.
//
// A frame is one graph for one arena and one set of sizes. Its program is an array of words, in which a step is a number
// (the order of `steps` below) and what that step takes. A slot holds a handle of a tensor: slots from 0 on are the
// call's and empty between calls (and for inputs that are None); -1, -2, ... are the frame's own tensors, views of its arena and constants. Only one
// call at a time uses a frame.

typedef __INT64_TYPE__ int64_t;
typedef __INT32_TYPE__ int32_t;

typedef struct python PyObject;
typedef PyObject *(*Method)(PyObject *, PyObject *);
struct method {
  const char *name;
  Method function;
  int flags;
  const char *about;
};

// of Python's stable ABI
extern PyObject *PyExc_RuntimeError;
extern char _Py_NoneStruct[];
extern void PyErr_SetString(PyObject *, const char *);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
extern void PyErr_Restore(PyObject *, PyObject *, PyObject *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern PyObject *PyCFunction_NewEx(struct method *, PyObject *, PyObject *);
extern PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
extern void *PyCapsule_GetPointer(PyObject *, const char *);
extern PyObject *PyList_New(long);
extern PyObject *PyList_GetItem(PyObject *, long);
extern int PyList_SetItem(PyObject *, long, PyObject *);
extern int PyList_Append(PyObject *, PyObject *);
extern int PyList_Insert(PyObject *, long, PyObject *);
extern int PyList_SetSlice(PyObject *, long, long, PyObject *);
extern long PyList_Size(PyObject *);
extern PyObject *PyTuple_GetItem(PyObject *, long);
extern PyObject *PyLong_FromLongLong(long long);
extern PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
extern void Py_IncRef(PyObject *);
extern void Py_DecRef(PyObject *);

// of torch's C shim; each returns 0, or else it raised an exception
struct shim {
  int (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, void **);
  int (*reinterpret_tensor)(void *, int64_t, const int64_t *, const int64_t *, int64_t, void **);
  int (*get_data_ptr)(void *, void **);
  int (*new_tensor_handle)(void *, void **);
  int (*delete_tensor_object)(void *);
};

struct frame {
  const int64_t *program;
  const struct shim *shim;
  void **slots;
  int64_t slot_count;
  void **fixed;
  int64_t fixed_count;
  const int64_t *taken;  // of each input, its slot; -1 for one that is no tensor, or that nothing needs
  int64_t input_count;
  void **pointers;  // the table that is passed to segments; for launches, the numbers that they take by value are here too
  const int64_t *sizes;
  void *runtime;
  int64_t device_type, device_index;  // as torch's shim numbers them
  // of a GPU: cuLaunchKernel, the stream, and the code of a launch that failed
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  void *stream;
  int64_t error;
  int64_t by_python;  // whether torch's functions are called through Python, for modes and profilers to see them
  PyObject *owned;    // a tuple of what follows, and of everything that must live as long as the frame
  PyObject *handles_of, *tensors_of, *failed, *finished, *functions;
  void *thread;
};

static void *handle(const struct frame *f, int64_t slot) { return slot < 0 ? f->fixed[-1 - slot] : f->slots[slot]; }

static void drop(const struct frame *f, int64_t slot) {
  void *tensor = f->slots[slot];
  f->slots[slot] = 0;
  if (tensor) f->shim->delete_tensor_object(tensor);
}

// ---- between handles and Python's tensors; the caller holds the GIL ----

// Put the handles of a list of tensors into slots. Return 0, or -1 with an exception set.
static int receive(const struct frame *f, PyObject *tensors, int64_t count, const int64_t *slots) {
  PyObject *handles = PyObject_CallFunctionObjArgs(f->handles_of, tensors, (void *)0);
  if (!handles) return -1;
  for (int64_t i = 0; i < count; ++i) {
    drop(f, slots[i]);
    f->slots[slots[i]] = PyCapsule_GetPointer(PyList_GetItem(handles, i), 0);
  }
  Py_DecRef(handles);
  return 0;
}

// Return the capsule of a new handle, or of the slot's own, which is then emptied; NULL with an exception set.
static PyObject *capsule(const struct frame *f, int64_t slot, int moved) {
  void *tensor = handle(f, slot);
  if (moved)
    f->slots[slot] = 0;
  else if (f->shim->new_tensor_handle(tensor, &tensor)) {
    PyErr_SetString(PyExc_RuntimeError, "opkit: torch gave no handle of a tensor");
    return 0;
  }
  return PyCapsule_New(tensor, 0, 0);
}

// Return a list of tensors, with None for empty slots; NULL with an exception set. Slots that `moves` marks are emptied.
static PyObject *tensors(const struct frame *f, int64_t count, const int64_t *slots, const int64_t *moves) {
  PyObject *handles = PyList_New(0), *found = 0;
  char empty[count + 1];
  if (!handles) return 0;
  for (int64_t i = 0; i < count; ++i) {
    if ((empty[i] = !handle(f, slots[i]))) continue;
    PyObject *tensor = capsule(f, slots[i], moves && moves[i]);
    if (tensor) PyList_Append(handles, tensor);
    if (tensor) Py_DecRef(tensor);
  }
  if (!PyErr_Occurred()) found = PyObject_CallFunctionObjArgs(f->tensors_of, handles, (void *)0);
  Py_DecRef(handles);
  for (int64_t i = 0; found && i < count; ++i)
    if (empty[i]) PyList_Insert(found, i, (PyObject *)_Py_NoneStruct);
  return found;
}

// Call a Python function, which takes a list of tensors and returns one.
static int call(const struct frame *f, int64_t function, int64_t count, const int64_t *slots, int64_t results,
                const int64_t *to) {
  PyObject *arguments = tensors(f, count, slots, 0);
  if (!arguments) return -1;
  PyObject *returned = PyObject_CallFunctionObjArgs(PyTuple_GetItem(f->functions, function), arguments, (void *)0);
  Py_DecRef(arguments);
  if (!returned) return -1;
  const int failed = results ? receive(f, returned, results, to) : 0;
  Py_DecRef(returned);
  return failed;
}

// ---- steps: each returns what follows it, or NULL if it failed; the GIL is not held ----

static const int64_t *point(struct frame *f, const int64_t *w) {  // slot, entry of the table
  void *tensor = handle(f, w[1]);
  return !tensor || f->shim->get_data_ptr(tensor, &f->pointers[w[2]]) ? 0 : w + 3;
}

static const int64_t *value(struct frame *f, const int64_t *w) {  // slot of 8 bytes in the CPU's memory, entry of the table
  void *tensor = handle(f, w[1]), *data;
  if (!tensor || f->shim->get_data_ptr(tensor, &data)) return 0;
  f->pointers[w[2]] = *(void **)data;
  return w + 3;
}

static const int64_t *align(struct frame *f, const int64_t *w) {  // slot, function that copies
  void *data;
  if (f->shim->get_data_ptr(handle(f, w[1]), &data)) return 0;
  if (!((int64_t)data & 15)) return w + 3;
  PyEval_RestoreThread(f->thread);
  const int failed = call(f, w[2], 1, w + 1, 1, w + 1);
  f->thread = PyEval_SaveThread();
  return failed ? 0 : w + 3;
}

static const int64_t *view(struct frame *f, const int64_t *w) {  // slot, of slot, offset, dimensions, sizes, strides
  const int64_t n = w[4];
  void *of = handle(f, w[2]);
  // the offset counts from where the other tensor begins
  return !of || f->shim->reinterpret_tensor(of, n, w + 5, w + 5 + n, w[3], &f->slots[w[1]]) ? 0 : w + 5 + 2 * n;
}

static const int64_t *allocate(struct frame *f, const int64_t *w) {  // slot, entry or -1, dtype, dimensions, sizes, strides
  const int64_t n = w[4];
  if (f->shim->empty_strided(n, w + 5, w + 5 + n, (int32_t)w[3], (int32_t)f->device_type,
                             (int32_t)f->device_index, &f->slots[w[1]]))
    return 0;
  if (w[2] >= 0 && f->shim->get_data_ptr(f->slots[w[1]], &f->pointers[w[2]])) return 0;
  return w + 5 + 2 * n;
}

static const int64_t *segment(struct frame *f, const int64_t *w) {  // function's address, step of the plan, first entry
  int64_t (*run)(void *const *, const int64_t *, void *) = (void *)w[1];
  return run(f->pointers + w[3], f->sizes, f->runtime) ? 0 : w + 4;
}

// number, function, programs, threads, shared memory, count; of each parameter its entry of the table, or -1 and its value
static const int64_t *launch(struct frame *f, const int64_t *w) {
  const int64_t n = w[6], *p = w + 7;
  void *parameters[n];
  for (int64_t i = 0; i < n; ++i)
    parameters[i] = p[2 * i] >= 0 ? (void *)&f->pointers[p[2 * i]] : (void *)&p[2 * i + 1];
  if (w[3] > 0) f->error = f->launch((void *)w[2], w[3], 1, 1, w[4], 1, 1, w[5], f->stream, parameters, 0);
  return f->error ? 0 : p + 2 * n;
}

static const int64_t *python(struct frame *f, const int64_t *w) {  // function, count, slots, count of results, slots
  const int64_t *to = w + 3 + w[2];
  PyEval_RestoreThread(f->thread);
  const int failed = call(f, w[1], w[2], w + 3, to[0], to + 1);
  f->thread = PyEval_SaveThread();
  return failed ? 0 : to + 1 + to[0];
}

// address of the shim's function, function of Python's, count, slots: "out = a b" of 3, or "out = c + a b" of 4: out c a b
static const int64_t *product(struct frame *f, const int64_t *w) {
  const int64_t *s = w + 4;
  int failed = 1;
  if (w[1] && !f->by_python) {
    void *out = handle(f, s[0]), *x = handle(f, s[1]), *y = handle(f, s[2]);
    if (!x || !y)  // None: Python says so
      failed = 1;
    else if (w[3] == 3)
      failed = ((int (*)(void *, void *, void *))w[1])(out, x, y);
    else if (handle(f, s[3]))
      failed = ((int (*)(void *, void *, void *, void *, double, double))w[1])(out, x, y, handle(f, s[3]), 1, 1);
  }
  if (failed) {  // the shim does not pass its exception on; the same call in Python raises it
    PyEval_RestoreThread(f->thread);
    failed = call(f, w[2], w[3], s, 0, 0);
    f->thread = PyEval_SaveThread();
  }
  return failed ? 0 : s + w[3];
}

static const int64_t *drop_slots(struct frame *f, const int64_t *w) {  // count, slots
  for (int64_t i = 0; i < w[1]; ++i) drop(f, w[2 + i]);
  return w + 2 + w[1];
}

static const int64_t *(*const steps[])(struct frame *, const int64_t *) = {
    point, value, align, view, allocate, segment, launch, python, product, drop_slots};
enum { END = sizeof steps / sizeof *steps };

// ---- calls ----

// Whether an input gets a slot: it is needed, and is not None, as the tokens are that order effects.
static int is_taken(const struct frame *f, PyObject *inputs, int64_t i) {
  return f->taken[i] >= 0 && PyList_GetItem(inputs, i) != (PyObject *)_Py_NoneStruct;
}

static int take(const struct frame *f, PyObject *inputs) {
  int64_t slots[f->input_count + 1], count = 0;
  PyObject *needed = inputs;
  if (PyList_Size(inputs) != f->input_count) {
    PyErr_SetString(PyExc_RuntimeError, "opkit: a compiled graph was called with another number of inputs");
    return -1;
  }
  for (int64_t i = 0; i < f->input_count; ++i)
    if (is_taken(f, inputs, i)) slots[count++] = f->taken[i];
  const int all = count == f->input_count;
  if (!all && !(needed = PyList_New(0))) return -1;
  for (int64_t i = 0; !all && i < f->input_count; ++i)
    if (is_taken(f, inputs, i)) PyList_Append(needed, PyList_GetItem(inputs, i));
  const int failed = receive(f, needed, count, slots);
  if (!all) Py_DecRef(needed);
  return failed || PyList_SetSlice(inputs, 0, f->input_count, 0) ? -1 : 0;
}

static PyObject *results(const struct frame *f, const int64_t *w) {  // count, slots, whether each is moved
  PyObject *returned = tensors(f, w[1], w + 2, w + 2 + w[1]);
  if (!returned || !f->finished) return returned;
  PyObject *all_results = PyObject_CallFunctionObjArgs(f->finished, returned, (void *)0);
  Py_DecRef(returned);
  return all_results;
}

static PyObject *fail(const struct frame *f, const int64_t *w) {
  if (PyErr_Occurred()) return 0;
  PyObject *at = PyLong_FromLongLong(w - f->program), *error = PyLong_FromLongLong(f->error);
  PyObject *none = at && error ? PyObject_CallFunctionObjArgs(f->failed, at, error, (void *)0) : 0;
  if (none) PyErr_SetString(PyExc_RuntimeError, "opkit: a step of a compiled graph failed");
  if (none) Py_DecRef(none);
  if (at) Py_DecRef(at);
  if (error) Py_DecRef(error);
  return 0;
}

static PyObject *perform(struct frame *f) {
  const int64_t *w = f->program, *next = w;
  f->error = 0;
  f->thread = PyEval_SaveThread();
  while (next && *next != END) {
    w = next;
    next = steps[*w](f, w);
  }
  PyEval_RestoreThread(f->thread);
  return next ? results(f, next) : fail(f, w);
}

static PyObject *opkit_run(PyObject *self, PyObject *inputs) {
  struct frame *f = PyCapsule_GetPointer(self, 0);
  PyObject *found = take(f, inputs) ? 0 : perform(f);
  PyObject *type = 0, *value = 0, *trace = 0;
  if (!found) PyErr_Fetch(&type, &value, &trace);  // destructors of tensors must not touch it
  for (int64_t i = 0; i < f->slot_count; ++i) drop(f, i);
  if (!found) PyErr_Restore(type, value, trace);
  return found;
}

static void release(PyObject *capsule) {
  struct frame *f = PyCapsule_GetPointer(capsule, 0);
  for (int64_t i = 0; i < f->fixed_count; ++i)
    if (f->fixed[i]) f->shim->delete_tensor_object(f->fixed[i]);
  Py_DecRef(f->owned);
}

// Return the function of a frame, which takes a list of inputs, empties it, and returns a list of results. `fixed` is a list
// of the frame's own tensors.
__attribute__((visibility("default"))) PyObject *opkit_function(struct frame *f, PyObject *fixed) {
  static struct method method = {"run", opkit_run, 8, 0};
  PyObject *handles = PyObject_CallFunctionObjArgs(f->handles_of, fixed, (void *)0);
  if (!handles) return 0;
  for (int64_t i = 0; i < f->fixed_count; ++i) f->fixed[i] = PyCapsule_GetPointer(PyList_GetItem(handles, i), 0);
  Py_DecRef(handles);
  Py_IncRef(f->owned);
  PyObject *capsule = PyCapsule_New(f, 0, release);
  PyObject *run = capsule ? PyCFunction_NewEx(&method, capsule, 0) : 0;
  if (capsule) Py_DecRef(capsule);
  return run;
}
