#include "python.hpp"

#include <pybind11/stl.h>

#include <stdexcept>

#include "timing.hpp"

namespace py = pybind11;

namespace opkit::launch {
namespace {

constexpr size_t kMost = 700;  // characters of an exception's text, so that its line has room in an opk_message too

py::tuple numbers(const int64_t* values, int64_t count) {
    py::tuple result(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) result[static_cast<size_t>(i)] = values[i];
    return result;
}

py::object tensor(const opk_tensor* tensor) {
    if (tensor == nullptr) return py::none();
    return py::make_tuple(reinterpret_cast<uintptr_t>(tensor->data), tensor->dtype, tensor->device_index,
                          numbers(tensor->sizes, tensor->rank), numbers(tensor->strides, tensor->rank), beyond_int32(*tensor));
}

py::object scalar(const Source& source, opk_value value) {
    if (source.real()) return py::float_(value.f);
    if (source.kind == OPK_KIND_BOOL || source.role == Role::kBool) return py::bool_(value.i != 0);
    return py::int_(value.i);
}

py::object object(const Frame& frame, size_t i) {
    const Source& source = frame.source(i);
    const opk_value value = frame.values[i];
    if (source.tensor()) return tensor(frame.tensor(i));
    if (source.role == Role::kText)
        return value.p == nullptr ? py::none() : py::object(py::str(static_cast<const char*>(value.p)));
    if (source.role == Role::kInts)
        return value.p == nullptr
                   ? py::none()
                   : py::object(numbers(static_cast<const int64_t*>(value.p), frame.values[source.length].i));
    return frame.absent(i) ? py::none() : scalar(source, frame.scalar(i));
}

// Whether a file belongs to a package that the author of a kernel did not write.
bool of_machinery(const std::string& file) {
    const py::dict modules = py::module_::import("sys").attr("modules");
    for (const char* package : {"opkit", "triton", "torch"}) {
        if (!modules.contains(package)) continue;
        const auto path = py::getattr(modules[package], "__file__", py::none());
        if (path.is_none()) continue;
        const std::string init = py::str(path);
        if (file.rfind(init.substr(0, init.find_last_of("/\\") + 1), 0) == 0) return true;
    }
    return file.rfind("<frozen", 0) == 0;
}

std::string line_of(const py::object& trace) {
    std::string line;
    for (py::object each = trace; each && !each.is_none(); each = each.attr("tb_next")) {
        const std::string file = py::str(each.attr("tb_frame").attr("f_code").attr("co_filename"));
        if (!of_machinery(file)) line = " (" + file + ":" + std::string(py::str(each.attr("tb_lineno"))) + ")";
    }
    return line;
}

std::shared_ptr<const Entry> make_entry(const py::object& function, const std::shared_ptr<PythonCall>& call) {
    try {
        const py::object answer = function(call);
        if (answer.is_none()) return nullptr;
        if (py::isinstance<Entry>(answer)) return answer.cast<std::shared_ptr<Entry>>();
        throw std::runtime_error("an Entry was expected, not " + std::string(py::repr(answer)));
    } catch (py::error_already_set& error) {
        const std::string text = text_of(error);
        if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // torch makes a RuntimeError of this one
        throw std::runtime_error(text);
    }
}

}  // namespace

std::string text_of(const py::error_already_set& error) {
    try {
        std::string text = py::str(error.value());
        if (text.size() > kMost) text = text.substr(0, kMost) + "...";
        return std::string(py::str(error.type().attr("__name__"))) + (text.empty() ? "" : ": ") + text +
               line_of(error.trace());
    } catch (py::error_already_set&) {  // its text cannot be read
        return error.what();
    }
}

Launcher::Miss ask_python(py::object function) {
    return [function = std::move(function)](const Launcher& launcher, const Frame& frame, const Key& key) {
        const py::gil_scoped_acquire gil;
        if (auto made = launcher.find(key)) return made;  // by another thread, while this one waited for the GIL
        const auto call = std::make_shared<PythonCall>(launcher, frame);
        struct End {
            PythonCall& call;
            ~End() { call.end(); }
        } end{*call};
        return make_entry(function, call);
    };
}

const Frame& PythonCall::frame() const {
    if (frame_ == nullptr)
        throw std::runtime_error(
            "this call has ended; it can be looked at in the function that was called with it alone");
    return *frame_;
}

py::list PythonCall::values() const {
    py::list result;
    for (size_t i = 0; i < frame().sources->size(); i++) result.append(object(frame(), i));
    return result;
}

bool PythonCall::capturing() const { return Driver::is_captured(frame().stream); }

void PythonCall::launch(const Entry& entry) const {
    const Frame& frame = this->frame();
    entry.check(launcher_->sources);
    const py::gil_scoped_release released;
    entry.launch(frame);
}

double PythonCall::time(const Entry& entry, double warmup, double run, const std::vector<int64_t>& written) const {
    const Frame& frame = this->frame();
    entry.check(launcher_->sources);
    for (const int64_t source : written) require_tensor(launcher_->sources, source, "written");
    const py::gil_scoped_release released;
    return opkit::launch::time(entry, frame, {warmup, run}, written);
}

}  // namespace opkit::launch
