// Attention forward and backward, of every ISA that runs here, against float64.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../../cpp_ext/attention/backward_call.hpp"
#include "reference.hpp"

namespace opkit::driver {
namespace {

constexpr Kind kKinds[] = {Kind::F32, Kind::Bf16, Kind::F16};

attention::Type type_of(Kind kind) {
    return kind == Kind::F32 ? attention::Type::Float : kind == Kind::Bf16 ? attention::Type::Brain : attention::Type::Half;
}

double bound_of(Kind kind) { return kind == Kind::F32 ? 1e-5 : kind == Kind::Bf16 ? 2e-2 : 3e-3; }

attention::Operand operand(Tensor& t) { return {t.bytes.data(), {t.stride[0], t.stride[1], t.stride[2]}, type_of(t.kind)}; }

struct Case {
    std::string name;
    Problem problem;
    MaskCase mask;
    BiasCase bias;
    bool out_is_bshd;
    int64_t gap;
    bool poisoned;
};

// The tensors of a case. Keys that no row of a sequence sees are NaN; so are, where it is poisoned, some that are seen.
struct Inputs {
    Inputs(const Case& c, Kind kind)
        : q(kind, c.problem.shape.batch, c.problem.shape.heads, c.problem.shape.queries, c.problem.shape.head, c.out_is_bshd, c.gap),
          k(kind, c.problem.shape.batch, c.problem.shape.kv_heads, c.problem.shape.keys, c.problem.shape.head, c.out_is_bshd, c.gap),
          v(kind, c.problem.shape.batch, c.problem.shape.kv_heads, c.problem.shape.keys, c.problem.shape.columns, c.out_is_bshd, c.gap),
          gradient(kind, q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3], !c.out_is_bshd, 0) {
        Random random(42);
        for (Tensor* each : {&q, &k, &v, &gradient}) each->fill(random);
        for (int64_t b = 0; b < k.sizes[0]; ++b)
            for (int64_t j = 0; j < k.sizes[2]; ++j)
                if (!seen(c.problem, b, j)) hide(b, j);
        if (c.poisoned && k.sizes[2] > 3) {
            k.poison(0, 0, k.sizes[2] / 3);
            v.poison(0, 0, k.sizes[2] / 2);
        }
    }
    static bool seen(const Problem& p, int64_t b, int64_t j) {
        for (int64_t i = 0; i < p.shape.queries; ++i)
            if (p.visible(b, 0, i, j)) return true;
        return false;
    }
    void hide(int64_t b, int64_t j) {
        for (int64_t h = 0; h < k.sizes[1]; ++h) k.poison(b, h, j), v.poison(b, h, j);
    }
    Tensor q, k, v, gradient;
};

double largest(const Doubles& values) {
    double most = 0.1;
    for (double value : values) most = std::isfinite(value) ? std::max(most, std::fabs(value)) : most;
    return most;
}

// Within the bound, and no number exactly where there is none.
bool near(Tensor& found, const Doubles& wanted, double bound) {
    const double allowed = bound * largest(wanted);
    const int64_t heads = found.sizes[1], rows = found.sizes[2], columns = found.sizes[3];
    for (int64_t n = 0; n < static_cast<int64_t>(wanted.size()); ++n) {
        const int64_t row = n / columns;
        const double value = found.value(row / rows / heads, row / rows % heads, row % rows, n % columns);
        const double exact = wanted[static_cast<size_t>(n)];
        if (std::isfinite(exact) ? !(std::fabs(value - exact) <= allowed) : std::isfinite(value)) return false;
    }
    return found.gaps_kept();
}

bool near(const std::vector<float>& found, const Doubles& wanted, double bound) {
    for (size_t n = 0; n < wanted.size(); ++n) {
        if (std::isinf(wanted[n]) || std::isnan(wanted[n])) {
            if (std::isnan(wanted[n]) ? !std::isnan(found[n]) : found[n] != static_cast<float>(wanted[n])) return false;
        } else if (!(std::fabs(found[n] - wanted[n]) <= bound * (1 + std::fabs(wanted[n])))) {
            return false;
        }
    }
    return true;
}

// One case of one kind: its inputs, what is right, and the calls.
class Trial {
public:
    Trial(const Case& given, Kind kind, Checks& checks)
        : case_(given), kind_(kind), checks_(checks), in_(given, kind), mask_(given.mask.program, given.mask.tensors, shape().batch, shape().keys, given.mask.functions),
          biases_(given.bias.program, given.bias.tensors, shape().queries, shape().keys, given.bias.functions),
          wanted_(attend(given.problem, in_.q, in_.k, in_.v)) {
        Random random(7);
        for (size_t n = 0; n < wanted_.lse.size(); ++n) of_lse_.push_back(static_cast<float>(random.normal()));
        if (!given.poisoned) slopes_ = differentiate(given.problem, wanted_, in_.q, in_.k, in_.v, in_.gradient, of_lse_);
    }

    void run(const isa::Choice& choice) {
        Tensor out = result(in_.q, shape().columns);
        std::vector<float> lse(wanted_.lse.size());
        forward(choice, out, lse);
        Tensor again = result(in_.q, shape().columns);
        std::vector<float> lse_again(wanted_.lse.size());
        threads = 3;
        forward(choice, again, lse_again);
        if (!case_.poisoned) backward(choice, out, lse);
        threads = 1;
        expect(choice, "out", near(out, wanted_.out, bound_of(kind_)));
        expect(choice, "lse", near(lse, wanted_.lse, 2e-5));
        expect(choice, "threads", out.bytes == again.bytes && std::memcmp(lse.data(), lse_again.data(), 4 * lse.size()) == 0);
    }

private:
    const Shape& shape() const { return case_.problem.shape; }
    Tensor result(const Tensor& like, int64_t columns) const {
        return Tensor(kind_, like.sizes[0], like.sizes[1], like.sizes[2], columns, !case_.out_is_bshd, 3);
    }
    void expect(const isa::Choice& choice, const char* what, bool good) {
        checks_.expect(good, choice.cap + ": attention " + what + ": " + case_.name + ", " + name_of(kind_));
    }
    attention::Call call(const isa::Choice& choice) {
        const Shape& s = shape();
        return {s.batch, s.heads, s.kv_heads, s.queries, s.keys, s.head, s.columns, operand(in_.q), operand(in_.k), operand(in_.v),
                nullptr, {}, nullptr, case_.problem.sinks.empty() ? nullptr : case_.problem.sinks.data(),
                static_cast<float>(case_.problem.scale / case_.bias.factor), static_cast<float>(case_.problem.softcap), mask_, biases_, &choice.kernels};
    }
    void forward(const isa::Choice& choice, Tensor& out, std::vector<float>& lse) {
        attention::Call asked = call(choice);
        asked.out = out.bytes.data();
        std::copy_n(out.stride, 3, asked.out_stride);
        asked.lse = lse.data();
        attention::forward(asked);
    }
    void backward(const isa::Choice& choice, Tensor& out, const std::vector<float>& lse) {
        Tensor q = result(in_.q, shape().head), k = result(in_.k, shape().head), v = result(in_.v, shape().columns);
        std::vector<float> delta(lse.size());
        attention::backward(call(choice), {operand(out), operand(in_.gradient), lse.data(), of_lse_.data(), operand(q), operand(k),
                                           operand(v), delta.data()});
        expect(choice, "gradient of q", near(q, slopes_.q, bound_of(kind_)));
        expect(choice, "gradient of k", near(k, slopes_.k, bound_of(kind_)));
        expect(choice, "gradient of v", near(v, slopes_.v, bound_of(kind_)));
    }

    const Case& case_;
    const Kind kind_;
    Checks& checks_;
    Inputs in_;
    const attention::Mask mask_;
    const attention::Biases biases_;
    const Results wanted_;
    std::vector<float> of_lse_;
    Slopes slopes_;
};

std::string text(const Shape& s) {
    std::string found = "shape";
    for (int64_t n : {s.batch, s.heads, s.kv_heads, s.queries, s.keys, s.head, s.columns}) found += " " + std::to_string(n);
    return found;
}

Case plain(const Shape& shape) {
    const MaskCase none = mask_cases({1, 1, 1, 1, 1, 1, 1})[0];
    const Problem problem{shape, 1 / std::sqrt(static_cast<double>(shape.head)), 0, none.visible, {}, {}};
    return {text(shape), problem, none, {}, false, 0, false};
}

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const Shape& shape : {Shape{1, 1, 1, 1, 1, 1, 1}, Shape{2, 2, 1, 5, 70, 7, 9}, Shape{1, 2, 2, 97, 65, 20, 33},
                               Shape{1, 1, 1, 13, 130, 80, 64}, Shape{1, 1, 1, 3, 66, 257, 128}})
        all.push_back(plain(shape));
    all[1].gap = 3, all[2].out_is_bshd = true, all[2].gap = 2, all[3].out_is_bshd = true;
    const Shape shape{2, 4, 2, 23, 133, 16, 24};
    for (const MaskCase& mask : mask_cases(shape))
        for (bool poisoned : {false, true}) {
            Case made = plain(shape);
            made.name = "mask " + mask.name + (poisoned ? ", NaN in some keys" : "");
            made.mask = mask, made.problem.visible = mask.visible, made.poisoned = poisoned;
            all.push_back(made);
        }
    for (const BiasCase& bias : bias_cases(shape)) {
        Case made = plain(shape);
        made.name = "bias " + bias.name, made.bias = bias, made.problem.added = bias.added;
        made.problem.scale *= bias.factor;
        all.push_back(made);
    }
    const Case biased = all.back();
    for (int n = 0; n < 3; ++n) {  // a cap; a cap, sinks, a bias and a mask; a negative scale and sinks
        Case made = n == 1 ? biased : plain(shape);
        made.problem.softcap = n < 2 ? 2.5 : 0;
        if (n == 1) made.mask = mask_cases(shape)[6], made.problem.visible = made.mask.visible;
        if (n > 0) made.problem.sinks = {0.5f, -3.0f, 20.0f, 0.0f};
        if (n == 2) made.problem.scale = -0.4;
        made.name = n == 0 ? "softcap" : n == 1 ? "softcap, sinks, bias, mask" : "negative scale, sinks";
        all.push_back(made);
    }
    return all;
}

}  // namespace

void check_attention(const Isas& isas, Checks& checks) {
    for (const Case& each : cases())
        for (Kind kind : kKinds) {
            Trial trial(each, kind, checks);
            for (const isa::Choice* choice : isas) trial.run(*choice);
        }
}

}  // namespace opkit::driver
