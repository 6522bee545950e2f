#include "bind_decode.hpp"

#include <string>

#include "../isa/bind.hpp"
#include "../runtime/failure.hpp"
#include "bind_programs.hpp"
#include "decode_call.hpp"

namespace opkit::attention {
namespace {

template <class T>
T taken(const py::kwargs& fields, const char* name) {
    if (!fields.contains(name)) throw py::type_error(std::string("DecodeAttention() needs ") + name);
    return fields[name].cast<T>();
}

// Calls of the same shapes: all but where the tensors lie.
class Decode {
public:
    explicit Decode(const py::kwargs& fields) {
#define OPKIT_DECODE_TAKE(type, name) call_.name = taken<type>(fields, #name);
        OPKIT_DECODE_SHAPE(OPKIT_DECODE_TAKE)
#undef OPKIT_DECODE_TAKE
        if (!fields.contains("programs") || fields["programs"].is_none()) return;
        const auto of = fields["programs"].cast<py::dict>();
        programs_.emplace(of["sizes"].cast<Sizes>(), of["mask"].cast<Program>(), of["mask_tensors"].cast<std::vector<Strides>>(),
                          of["bias"].cast<Program>(), of["bias_tensors"].cast<std::vector<std::pair<Strides, std::string>>>(),
                          of["mask_functions"].cast<std::vector<Described>>(), of["bias_functions"].cast<std::vector<Described>>(),
                          true);
        by_head_ = of["by_head"].cast<bool>();
    }

    void operator()(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t sinks, int64_t table, int64_t lengths,
                    int64_t starts, int64_t k_scale, int64_t v_scale, const Addresses& mask_tensors,
                    const Addresses& bias_tensors) const {
        DecodeCall call = call_;
        call.q = q, call.k = k, call.v = v, call.out = out, call.lse = lse, call.sinks = sinks;
        call.table = table, call.lengths = lengths, call.starts = starts, call.k_scale = k_scale, call.v_scale = v_scale;
        const isa::Table& kernels = isa::environment_table();
        std::optional<Mask> mask;
        std::optional<Biases> biases;
        if (programs_ && !programs_->mask) mask.emplace(programs_->make_mask(mask_tensors));
        if (programs_ && !programs_->biases) biases.emplace(programs_->make_biases(bias_tensors));
        const Report report;
        {
            const py::gil_scoped_release released;
            const DecodePrograms programs = described(mask, biases);
            decode(call, kernels, programs_ ? &programs : nullptr);
        }
        if (report.failed()) throw std::runtime_error(report.text());
    }

private:
    DecodePrograms described(const std::optional<Mask>& mask, const std::optional<Biases>& biases) const {
        if (!programs_) return {};
        const Mask* hides = programs_->mask_words.empty() ? nullptr : mask ? &*mask : &*programs_->mask;
        return {hides, programs_->bias_words.empty() ? nullptr : biases ? &*biases : &*programs_->biases, by_head_};
    }

    DecodeCall call_{};
    std::optional<Programs> programs_;
    bool by_head_ = false;
};

}  // namespace

void bind_decode(py::module_& m) {
    py::class_<Decode>(m, "DecodeAttention",
                       "Attention of few queries, of tensors of some shapes; the fields are those of cpp_ext/attention/decode_call.hpp.")
        .def(py::init<const py::kwargs&>())
        .def("__call__", &Decode::operator(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"),
             py::arg("sinks") = 0, py::arg("table") = 0, py::arg("lengths") = 0, py::arg("starts") = 0, py::arg("k_scale") = 0,
             py::arg("v_scale") = 0, py::arg("mask_tensors") = Addresses(), py::arg("bias_tensors") = Addresses());
}

}  // namespace opkit::attention
