#include "program.hpp"

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace opkit {
namespace {

struct Program {
    std::vector<int64_t> words;
    Program* next;
};

using Head = std::atomic<Program*>;

// The head of a kernel's list lies in its opk_state, which is zeroed at the start.
Head& head(const opk_kernel& kernel) {
    static_assert(sizeof(Head) == sizeof(void*));
    return *reinterpret_cast<Head*>(&kernel.state->programs);
}

// A position in a program's words.
struct Cursor {
    const int64_t* at;
    const int64_t* end;
    int64_t next() { return at < end ? *at++ : -1; }
};

uint64_t hash(const char* text, int64_t count) {  // FNV-1a
    uint64_t value = 14695981039346656037u;
    for (int64_t i = 0; i < count; i++) value = (value ^ static_cast<uint8_t>(text[i])) * 1099511628211u;
    return value;
}

bool fits(const View& view, Cursor& key) {
    const int64_t rank = key.next(), dtype = key.next(), contiguous = key.next();
    return view.handle != nullptr && view.rank == rank && view.dtype == dtype && view.contiguous == (contiguous != 0);
}

// Whether one argument is as the key says. On a mismatch the cursor's place is of no further use.
bool fits(const Arguments& call, int32_t i, Cursor& key) {
    const opk_input& input = call.inputs[i];
    const int32_t kind = call.kernel->arguments[i].kind;
    if (kind == OPK_KIND_IGNORED) return true;
    if (key.next() != input.present) return false;
    if (!input.present) return true;
    switch (kind) {
        case OPK_KIND_TENSOR: return fits(call.views[call.first[i]], key);
        case OPK_KIND_TENSORS:
            if (key.next() != input.count) return false;
            for (int64_t j = 0; j < input.count; j++)
                if (!fits(call.views[call.first[i] + j], key)) return false;
            return true;
        case OPK_KIND_BOOL:
        case OPK_KIND_DTYPE: return key.next() == input.as.i;
        case OPK_KIND_STRING: return static_cast<uint64_t>(key.next()) == hash(input.as.text, input.count);
        case OPK_KIND_INTS:
        case OPK_KIND_FLOATS: return key.next() == input.count;
        case OPK_KIND_BOOLS:
            if (key.next() != input.count) return false;
            for (int64_t j = 0; j < input.count; j++)
                if (key.next() != input.as.bools[j]) return false;
            return true;
        default: return true;
    }
}

// Python's division, rounded down. False where it has no value that fits.
bool floor_divide(int64_t a, int64_t b, int64_t& result) {
    if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
    result = a / b - (a % b != 0 && (a % b < 0) != (b < 0));
    return true;
}

bool modulo(int64_t a, int64_t b, int64_t& result) {
    int64_t quotient;
    if (!floor_divide(a, b, quotient)) return false;
    result = a - quotient * b;
    return true;
}

// Evaluates postfix code. False: it divides by zero or overflows, or the code is not sound.
class Evaluation {
public:
    explicit Evaluation(const Arguments& call) : call_(call) {}

    bool run(Cursor& program, int64_t& result) {
        const int64_t count = program.next();
        if (count < 1 || count > program.end - program.at) return false;
        Cursor code{program.at, program.at + count};
        program.at += count;
        depth_ = 0;
        while (code.at < code.end)
            if (!step(code)) return false;
        if (depth_ != 1) return false;
        result = stack_[0];
        return true;
    }

private:
    static constexpr int kDeepest = 64;

    bool push(int64_t value) {
        if (depth_ == kDeepest) return false;
        stack_[depth_++] = value;
        return true;
    }

    bool step(Cursor& code) {
        const int64_t operation = code.next();
        if (operation == OPK_CODE_CONSTANT) return push(code.next());
        if (operation <= OPK_CODE_FLOAT_IS) return operation >= 0 && load(operation, code);
        if (operation == OPK_CODE_NOT) return depth_ >= 1 && (stack_[depth_ - 1] = !stack_[depth_ - 1], true);
        if (operation == OPK_CODE_SELECT) return select();
        if (depth_ < 2) return false;
        const int64_t b = stack_[--depth_];
        return binary(operation, stack_[depth_ - 1], b);
    }

    bool load(int64_t operation, Cursor& code) {
        const int64_t argument = code.next(), item = code.next();
        if (argument < 0 || argument >= call_.kernel->argument_count || item < 0) return false;
        const opk_input& input = call_.inputs[argument];
        const int32_t kind = call_.kernel->arguments[argument].kind;
        const bool listed = kind == OPK_KIND_TENSORS || kind == OPK_KIND_INTS || kind == OPK_KIND_FLOATS;
        if (!input.present || item >= (listed ? input.count : 1)) return false;
        if (operation == OPK_CODE_INT) return push(listed ? input.as.ints[item] : input.as.i);
        const int64_t last = code.next();
        if (operation == OPK_CODE_FLOAT_IS) {
            const double value = listed ? input.as.floats[item] : input.as.f;
            return push(std::memcmp(&value, &last, sizeof value) == 0);
        }
        if (kind != OPK_KIND_TENSOR && kind != OPK_KIND_TENSORS) return false;
        const View& view = call_.views[call_.first[argument] + item];
        if (view.handle == nullptr || last < 0 || last >= view.rank) return false;
        return push(operation == OPK_CODE_SIZE ? view.sizes[last] : view.strides[last]);
    }

    bool select() {
        if (depth_ < 3) return false;
        depth_ -= 2;
        stack_[depth_ - 1] = stack_[depth_ - 1] ? stack_[depth_] : stack_[depth_ + 1];
        return true;
    }

    static bool binary(int64_t operation, int64_t& a, int64_t b) {
        switch (operation) {
            case OPK_CODE_ADD: return !__builtin_add_overflow(a, b, &a);
            case OPK_CODE_SUBTRACT: return !__builtin_sub_overflow(a, b, &a);
            case OPK_CODE_MULTIPLY: return !__builtin_mul_overflow(a, b, &a);
            case OPK_CODE_FLOOR_DIVIDE: return floor_divide(a, b, a);
            case OPK_CODE_MODULO: return modulo(a, b, a);
            case OPK_CODE_MINIMUM: a = a < b ? a : b; return true;
            case OPK_CODE_MAXIMUM: a = a > b ? a : b; return true;
            case OPK_CODE_EQUAL: a = a == b; return true;
            case OPK_CODE_NOT_EQUAL: a = a != b; return true;
            case OPK_CODE_LESS: a = a < b; return true;
            case OPK_CODE_LESS_EQUAL: a = a <= b; return true;
            case OPK_CODE_AND: a = a && b; return true;
            case OPK_CODE_OR: a = a || b; return true;
            default: return false;
        }
    }

    const Arguments& call_;
    int64_t stack_[kDeepest];
    int depth_ = 0;
};

bool write_strides(Cursor& program, Evaluation& evaluation, const int64_t* sizes, int64_t rank, int64_t* strides) {
    if (program.next() == 0) {
        int64_t stride = 1;
        for (int64_t i = rank; i-- > 0;) {
            strides[i] = stride;
            stride *= sizes[i] > 1 ? sizes[i] : 1;
        }
        return true;
    }
    for (int64_t i = 0; i < rank; i++)
        if (!evaluation.run(program, strides[i])) return false;
    return true;
}

bool lay_out(const Arguments& call, const Program& tried, Layout& made) {
    Cursor program{tried.words.data() + 1, tried.words.data() + tried.words.size()};
    for (int32_t i = 0; i < call.kernel->argument_count; i++)
        if (!fits(call, i, program)) return false;
    Evaluation evaluation(call);
    int64_t guard;
    if (!evaluation.run(program, guard) || !guard) return false;
    int64_t* layout = made.room(tried.words.size());  // each word of a layout takes one or more of its program
    int32_t expected = new_outputs(*call.kernel);
    for (; expected > 0 && program.at < program.end; expected--) {
        const int64_t dtype = program.next(), rank = program.next();
        if (rank < 0) return false;
        *layout++ = dtype;
        *layout++ = rank;
        for (int64_t i = 0; i < rank; i++)
            if (!evaluation.run(program, layout[i]) || layout[i] < 0) return false;
        if (!write_strides(program, evaluation, layout, rank, layout + rank)) return false;
        layout += 2 * rank;
    }
    return expected == 0 && program.at == program.end;
}

}  // namespace

int32_t new_outputs(const opk_kernel& kernel) {
    int32_t count = 0;
    for (int32_t i = 0; i < kernel.output_count; i++) count += kernel.outputs[i].alias < 0;
    return count;
}

bool lay_out(const Arguments& call, Layout& layout) {
    for (Program* tried = head(*call.kernel).load(std::memory_order_acquire); tried != nullptr; tried = tried->next)
        if (lay_out(call, *tried, layout)) return true;
    return false;
}

void add_program(const opk_kernel& kernel, std::vector<int64_t> words) {
    if (words.empty() || words[0] != static_cast<int64_t>(words.size()))
        throw std::invalid_argument("opkit: a program's first word is its length");
    Program* added = new Program{std::move(words), head(kernel).load()};
    while (!head(kernel).compare_exchange_weak(added->next, added, std::memory_order_release)) {
    }
}

void forget_programs(const opk_kernel& kernel) { head(kernel).store(nullptr, std::memory_order_release); }

}  // namespace opkit
