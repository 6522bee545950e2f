#include "bind.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"

namespace py = pybind11;

namespace opkit::isa {
namespace {

using Name = std::optional<std::string>;
using Stride = std::optional<int64_t>;

py::list names(bool (*wanted)(const Choice&)) {
    py::list found;
    for (const Choice& choice : choices())
        if (wanted(choice)) found.append(choice.cap);
    return found;
}

}  // namespace

const Choice& within(const std::optional<std::string>& cap) {
    if (cap) return choose(*cap);
    const char* set = std::getenv("OPKIT_ISA");  // os.environ writes through to it
    try {
        return choose(set == nullptr ? "" : set);
    } catch (const std::invalid_argument& error) {
        throw py::value_error(std::string("OPKIT_ISA: ") + error.what());
    }
}

namespace {

const Table& table_of(const Name& isa) {
    const Choice& choice = within(isa);
    if (isa && !choice.obstacle.empty()) throw py::value_error("'" + *isa + "' cannot run here: " + choice.obstacle);
    return choice.kernels;
}

py::dict isa_table(const Name& isa) {
    py::dict table;
    for (const auto& [kernel, variant] : within(isa).variants) table[kernel.c_str()] = variant;
    return table;
}

py::dict obstacles() {
    py::dict found;
    for (const Choice& choice : choices())
        if (!choice.obstacle.empty()) found[choice.cap.c_str()] = choice.obstacle;
    return found;
}

constexpr int64_t kLargest = int64_t{1} << 56;  // of a size or stride: kernels multiply them by small numbers

// How many elements a matrix by rows spans.
int64_t span(const std::string& name, int64_t rows, int64_t cols, int64_t stride) {
    if (rows < 0 || cols < 0) throw py::value_error(name + ": sizes must not be negative");
    int64_t elements;
    if (rows > kLargest || cols > kLargest || stride > kLargest || __builtin_mul_overflow(rows, stride, &elements))
        throw py::value_error(name + ": sizes are too large");
    if (stride < cols)
        throw py::value_error(name + ": rows " + std::to_string(stride) + " apart overlap, as they have " +
                              std::to_string(cols) + " elements");
    if (rows == 0 || cols == 0) return 0;
    return elements - stride + cols;
}

int64_t packed_span(const std::string& name, int64_t n, int64_t k) {
    const int64_t row = n > kLargest ? n : 2 * n;
    return span(name, k / 2 + k % 2, row, row);
}

bool contiguous(const py::buffer_info& info) {
    py::ssize_t expected = info.itemsize;
    for (py::ssize_t d = info.ndim - 1; d >= 0; expected *= info.shape[d--])
        if (info.shape[d] != 1 && info.strides[d] != expected) return info.size == 0;
    return true;
}

// A contiguous buffer of T, of any rank, with enough elements.
template <class T>
class Elements {
public:
    Elements(const char* name, const py::buffer& buffer, bool writable) : name_(name), info_(request(name, buffer, writable)) {
        constexpr char kFormat = sizeof(T) == 4 ? 'f' : 'H';
        const std::string native = info_.format.substr(info_.format.find_first_not_of("@="));
        if (native != std::string(1, kFormat))
            throw py::type_error(name_ + " must hold " +
                                 (kFormat == 'f' ? "float32 (format 'f')" : "bf16 bits as uint16 (format 'H')") +
                                 ", not format '" + info_.format + "'");
        if (!contiguous(info_)) throw py::value_error(name_ + " must be contiguous, by rows");
    }
    int64_t size() const { return info_.size; }
    T* with(int64_t needed) const {
        if (info_.size < needed)
            throw py::value_error(name_ + " has " + std::to_string(info_.size) + " elements; the sizes need " +
                                  std::to_string(needed));
        return static_cast<T*>(info_.ptr);
    }

private:
    static py::buffer_info request(const std::string& name, const py::buffer& buffer, bool writable) {
        try {
            return buffer.request(writable);
        } catch (py::error_already_set& error) {
            py::raise_from(error, PyExc_ValueError, (name + " gives no " + (writable ? "writable " : "") + "buffer").c_str());
            throw py::error_already_set();
        }
    }
    std::string name_;
    py::buffer_info info_;
};

using Floats = Elements<float>;
using Halves = Elements<uint16_t>;

void f32_to_bf16(const Name& isa, const py::buffer& src, const py::buffer& dst) {
    const Table& table = table_of(isa);
    const Floats from("src", src, false);
    const Halves to("dst", dst, true);
    uint16_t* target = to.with(from.size());
    py::gil_scoped_release released;
    table.f32_to_bf16(from.with(0), target, from.size());
}

void pack_b_bf16(const Name& isa, const py::buffer& b, const py::buffer& packed, int64_t n, int64_t k, Stride ldb) {
    const Table& table = table_of(isa);
    const Halves from("b", b, false), to("packed", packed, true);
    const uint16_t* source = from.with(span("b", k, n, ldb.value_or(n)));
    uint16_t* target = to.with(packed_span("packed", n, k));
    py::gil_scoped_release released;
    table.pack_b_bf16(source, ldb.value_or(n), target, n, k);
}

void bind_kernels(py::module_& m) {
    const py::object none = py::none();
    m.def("f32_to_bf16", &f32_to_bf16, py::arg("isa"), py::arg("src"), py::arg("dst"),
          "Round to nearest, ties to even; NaN becomes 0x7FC0.");
    m.def("pack_b_bf16", &pack_b_bf16, py::arg("isa"), py::arg("b"), py::arg("packed"), py::arg("n"), py::arg("k"),
          py::arg("ldb") = none, "b[k][n] to pairs [(k + 1) / 2][n][2], padded with zeros.");
}

}  // namespace

const Table& environment_table() { return table_of(std::nullopt); }

void bind(py::module_& m) {
    m.def("isas", [] { return names([](const Choice& choice) { return choice.obstacle.empty(); }); },
          "The instruction sets whose kernels run here, the widest last.");
    m.def("isas_built", [] { return names([](const Choice& choice) { return choice.built; }); },
          "The instruction sets whose kernels are in this build, the widest last.");
    m.def("isa_obstacles", &obstacles, "Why each of the other instruction sets of this architecture does not run here.");
    m.def("isa_table", &isa_table, py::arg("isa") = py::none(),
          "The variant chosen for every kernel within `isa`, or within OPKIT_ISA.");
    bind_kernels(m);
}

}  // namespace opkit::isa
