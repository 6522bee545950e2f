// Decoding attention of every ISA that runs here, contiguous and paged, against float64.
#include <algorithm>
#include <cmath>

#include "../../../cpp_ext/attention/decode_call.hpp"
#include "reference.hpp"

namespace opkit::driver {
namespace {

constexpr int64_t kFar = int64_t{1} << 62;

struct DecodeCase {
    std::string name;
    Shape shape;
    Kind q, kv;
    int64_t lower = -kFar, upper = kFar;
    double softcap = 0;
    bool sinks = false, paged = false, from_end = false, ragged = false;
    double scale = 0;  // 0: one over the root of the head's size
    bool seen_nan = false;
};

int64_t address(const void* at) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at)); }

int64_t number(Kind kind) {
    constexpr int64_t kNumbers[] = {0, 1, 2, 3, 4};  // of F32, Bf16, F16, I8, F8 among ElementType
    return kNumbers[static_cast<int>(kind)];
}

// One sequence's keys: how many there are, and where each lies (page and slot).
struct Sequence {
    int64_t first, queries, length;
};

constexpr int64_t kPage = 7;

// Inputs of a case. Tokens that no sequence has are NaN.
class Inputs {
public:
    explicit Inputs(const DecodeCase& c)
        : case_(c),
          q(c.q, c.ragged ? 1 : c.shape.batch, c.shape.heads, total_queries(), c.shape.head, true, 1),
          k(c.kv, pages(), c.shape.kv_heads, page_size(), c.shape.head, true, 3),
          v(c.kv, pages(), c.shape.kv_heads, page_size(), c.shape.columns, true, 0),
          out(c.q, q.sizes[0], c.shape.heads, q.sizes[2], c.shape.columns, false, 2),
          k_scale(Kind::F32, pages(), c.shape.kv_heads, page_size(), 1, true, 0),
          v_scale(Kind::F32, pages(), c.shape.kv_heads, page_size(), 1, true, 0),
          lse(static_cast<size_t>(q.sizes[0] * c.shape.heads * q.sizes[2])) {
        Random random(9);
        for (Tensor* each : {&q, &k, &v}) each->fill(random);
        for (int64_t n = 0; n < pages() * page_size() * c.shape.kv_heads; ++n) {
            set(k_scale, n, quantised() ? 0.01f + 0.001f * static_cast<float>(n % 5) : 1.0f);
            set(v_scale, n, quantised() ? 0.02f - 0.001f * static_cast<float>(n % 7) : 1.0f);
        }
        for (int64_t b = 0; b < c.shape.batch; ++b) {
            lengths.push_back(c.paged || c.ragged ? std::max<int64_t>(0, c.shape.keys - 3 * b) : c.shape.keys);
            starts.push_back(b == 0 ? 0 : starts.back() + b % 3);
            for (int64_t n = 0; n < table_row(); ++n)  // pages in an order that is none
                table.push_back(static_cast<int32_t>((b * table_row() + n) * 5 % pages()));
        }
        starts.push_back(c.shape.batch == 1 ? c.shape.queries : starts.back() + c.shape.batch % 3);
        hide_the_rest();
        if (c.seen_nan) v.poison(page_of(0, lengths[0] / 2), 0, slot_of(lengths[0] / 2));
    }

    Sequence sequence(int64_t b) const {
        const auto at = static_cast<size_t>(b);
        return {case_.ragged ? starts[at] : 0, case_.ragged ? starts[at + 1] - starts[at] : case_.shape.queries, lengths[at]};
    }
    bool quantised() const { return case_.kv == Kind::I8 || case_.kv == Kind::F8; }
    int64_t page_of(int64_t b, int64_t key) const {
        return case_.paged ? table[static_cast<size_t>(b * table_row() + key / kPage)] : b;
    }
    int64_t slot_of(int64_t key) const { return case_.paged ? key % kPage : key; }
    int64_t table_row() const { return (case_.shape.keys + kPage - 1) / kPage; }
    int64_t page_size() const { return case_.paged ? kPage : case_.shape.keys; }
    int64_t pages() const {  // a prime to 5, so that the order has each page once
        const int64_t needed = case_.paged ? case_.shape.batch * table_row() : case_.shape.batch;
        return case_.paged && needed % 5 == 0 ? needed + 1 : needed;
    }
    int64_t total_queries() const {
        int64_t sum = case_.shape.batch == 1 ? case_.shape.queries : 0;
        for (int64_t b = 1; case_.ragged && b <= case_.shape.batch && case_.shape.batch > 1; ++b) sum += b % 3;
        return case_.ragged ? sum : case_.shape.queries;
    }

private:
    static void set(Tensor& scales, int64_t n, float value) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
        std::copy_n(bytes, 4, scales.bytes.begin() + 4 * n);
    }
    void hide_the_rest() {
        std::vector<bool> used(static_cast<size_t>(pages() * page_size()));
        for (int64_t b = 0; b < case_.shape.batch; ++b)
            for (int64_t key = 0; key < lengths[static_cast<size_t>(b)]; ++key)
                used[static_cast<size_t>(page_of(b, key) * page_size() + slot_of(key))] = true;
        for (int64_t n = 0; n < pages() * page_size(); ++n)
            for (int64_t h = 0; h < case_.shape.kv_heads && !used[static_cast<size_t>(n)]; ++h) {
                k.poison(n / page_size(), h, n % page_size());
                v.poison(n / page_size(), h, n % page_size());
            }
    }
    const DecodeCase& case_;

public:
    Tensor q, k, v, out, k_scale, v_scale;
    std::vector<float> lse, sinks;
    std::vector<int64_t> lengths, starts;
    std::vector<int32_t> table;
};

double scale_of(const DecodeCase& c) { return c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.shape.head)); }

std::vector<float> sinks_of(const DecodeCase& c) {
    std::vector<float> all;
    for (int64_t h = 0; c.sinks && h < c.shape.heads; ++h) all.push_back(static_cast<float>(h) - 1.5f);
    return all;
}

attention::DecodeCall call_of(const DecodeCase& c, Inputs& in, const std::vector<float>& sinks) {
    const Shape& s = c.shape;
    attention::DecodeCall call{};
    const auto bytes = [](const Tensor& t, int n) { return t.stride[n] * size_of(t.kind); };
    call.sequences = s.batch, call.heads = s.heads, call.kv_heads = s.kv_heads, call.queries = in.q.sizes[2], call.keys = s.keys;
    call.d = s.head, call.dv = s.columns, call.q_type = number(c.q), call.kv_type = number(c.kv);
    call.starts = c.ragged ? address(in.starts.data()) : 0;
    call.lengths = c.paged || c.ragged ? address(in.lengths.data()) : 0;
    call.q = address(in.q.bytes.data()), call.k = address(in.k.bytes.data()), call.v = address(in.v.bytes.data());
    call.q_sequence = c.ragged ? 0 : bytes(in.q, 0), call.q_head = bytes(in.q, 1), call.q_token = bytes(in.q, 2);
    call.k_page = bytes(in.k, 0), call.k_head = bytes(in.k, 1), call.k_token = bytes(in.k, 2);
    call.v_page = bytes(in.v, 0), call.v_head = bytes(in.v, 1), call.v_token = bytes(in.v, 2);
    if (in.quantised()) {
        call.k_scale = address(in.k_scale.bytes.data()), call.v_scale = address(in.v_scale.bytes.data());
        call.k_scale_page = call.v_scale_page = in.k_scale.stride[0];
        call.k_scale_head = call.v_scale_head = in.k_scale.stride[1];
        call.k_scale_token = call.v_scale_token = in.k_scale.stride[2];
    }
    call.table = c.paged ? address(in.table.data()) : 0;
    call.table_row = in.table_row(), call.page_size = kPage, call.pages = in.pages();
    call.out = address(in.out.bytes.data());
    call.out_sequence = c.ragged ? 0 : bytes(in.out, 0), call.out_head = bytes(in.out, 1), call.out_token = bytes(in.out, 2);
    call.lse = address(in.lse.data());
    call.lse_sequence = c.ragged ? 0 : s.heads * in.q.sizes[2], call.lse_head = in.q.sizes[2], call.lse_token = 1;
    call.sinks = sinks.empty() ? 0 : address(sinks.data());
    call.lower = c.lower, call.upper = c.upper, call.from_end = c.from_end;
    call.scale = scale_of(c), call.softcap = c.softcap;
    return call;
}

// A row by its definition: its sums, and at the end the log-sum-exp.
Doubles exact_row(const DecodeCase& c, Inputs& in, const std::vector<float>& sinks, int64_t b, int64_t h, int64_t i) {
    const Sequence s = in.sequence(b);
    const int64_t shift = c.from_end ? s.length - s.queries : 0, kv = h / (c.shape.heads / c.shape.kv_heads);
    double total = sinks.empty() ? 0 : std::exp(static_cast<double>(sinks[static_cast<size_t>(h)]));
    Doubles sums(static_cast<size_t>(c.shape.columns + 1));
    for (int64_t key = 0; key < s.length; ++key) {
        const int64_t page = in.page_of(b, key), slot = in.slot_of(key), distance = key - i - shift;
        if (distance < c.lower || distance > c.upper) continue;
        double logit = 0;
        for (int64_t e = 0; e < c.shape.head; ++e)
            logit += in.q.value(c.ragged ? 0 : b, h, s.first + i, e) * in.k.value(page, kv, slot, e);
        logit *= scale_of(c) * in.k_scale.value(page, kv, slot, 0);
        const double weight = std::exp(c.softcap > 0 ? std::tanh(logit / c.softcap) * c.softcap : logit);
        total += weight;
        for (int64_t e = 0; e < c.shape.columns; ++e)
            sums[static_cast<size_t>(e)] += weight * in.v.value(page, kv, slot, e) * in.v_scale.value(page, kv, slot, 0);
    }
    for (double& sum : sums) sum = total > 0 ? sum / total : 0;
    sums.back() = std::log(total);
    return sums;
}

bool near(double found, double wanted, double bound) {
    if (std::isnan(wanted)) return std::isnan(found);
    return std::isinf(wanted) ? found == wanted : std::fabs(found - wanted) <= bound;
}

// The rounding of results, that of weights, which may be bf16 where all is, and of queries, which are int16 against int8.
double bound_of(const DecodeCase& c) {
    const double rounding = c.q == Kind::F32 ? 0 : c.q == Kind::Bf16 ? 0x1p-9 : 0x1p-12;
    return 4 * (rounding + (c.q == Kind::Bf16 && c.kv == Kind::Bf16 ? 0x1p-9 : 0) + 0x1p-17 + (c.kv == Kind::I8 ? 0x1p-13 : 0));
}

bool all_near(const DecodeCase& c, Inputs& in, const std::vector<float>& sinks) {
    bool good = in.out.gaps_kept();
    for (int64_t b = 0; b < c.shape.batch; ++b) {
        const Sequence s = in.sequence(b);
        for (int64_t h = 0; h < c.shape.heads; ++h)
            for (int64_t i = 0; i < s.queries; ++i) {
                const Doubles wanted = exact_row(c, in, sinks, b, h, i);
                const int64_t batch = c.ragged ? 0 : b, token = s.first + i;
                for (int64_t e = 0; e < c.shape.columns; ++e)
                    good &= near(in.out.value(batch, h, token, e), wanted[static_cast<size_t>(e)], bound_of(c));
                const auto at = static_cast<size_t>((batch * c.shape.heads + h) * in.q.sizes[2] + token);
                good &= near(in.lse[at], wanted.back(), c.kv == Kind::I8 ? 1e-3 : 2e-5);
            }
    }
    return good;
}

std::vector<DecodeCase> cases() {
    std::vector<DecodeCase> all;
    for (const Shape& shape : {Shape{2, 3, 3, 1, 1, 1, 1}, Shape{1, 6, 2, 3, 70, 7, 9}, Shape{1, 16, 1, 2, 100, 130, 96},
                               Shape{1, 4, 1, 4, 301, 80, 33}, Shape{1, 1, 1, 37, 65, 64, 64}, Shape{1, 4, 2, 1, 700, 32, 48}})
        for (Kind kind : {Kind::F32, Kind::Bf16, Kind::F16}) all.push_back({"contiguous", shape, kind, kind});
    const Shape shape{3, 4, 2, 3, 133, 40, 24};
    for (Kind q : {Kind::F32, Kind::Bf16, Kind::F16})
        for (Kind kv : {Kind::F32, Kind::Bf16, Kind::F16, Kind::I8, Kind::F8}) {
            DecodeCase made{"paged", shape, q, kv};
            made.paged = true, made.from_end = true, made.upper = 0, made.sinks = kv == Kind::F32;
            all.push_back(made);
            if (kv != Kind::I8) {
                made.name = "paged, a value is NaN", made.seen_nan = true;
                all.push_back(made);
                made.seen_nan = false;
            }
            made.name = "paged, ragged", made.ragged = true, made.lower = -40;
            all.push_back(made);
        }
    for (Kind kind : {Kind::F32, Kind::Bf16}) {
        all.push_back({"window", shape, kind, kind, 60, 70});
        all.push_back({"nothing visible", shape, kind, kind, 500, 600});
        all.push_back({"softcap", shape, kind, kind, -kFar, kFar, 1.5, true});
        all.push_back({"scale", shape, kind, kind, -3, 90, 0, false, false, false, false, -0.3});
    }
    return all;
}

std::string text(const DecodeCase& c) {
    return c.name + ", " + name_of(c.q) + " and " + name_of(c.kv) + ", " + std::to_string(c.shape.keys) + " keys of " +
           std::to_string(c.shape.head) + " and " + std::to_string(c.shape.columns);
}

}  // namespace

void check_decoding(const Isas& isas, Checks& checks) {
    for (const DecodeCase& each : cases())
        for (const isa::Choice* choice : isas) {
            Inputs in(each);
            const std::vector<float> sinks = sinks_of(each);
            threads = 2;
            attention::decode(call_of(each, in, sinks), choice->kernels);
            threads = 1;
            checks.expect(all_near(each, in, sinks), choice->cap + ": decoding: " + text(each));
        }
}

}  // namespace opkit::driver
