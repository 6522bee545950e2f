#include "dispatch.hpp"

#include <stdexcept>

#include "../cpu_features.hpp"

namespace opkit::isa {

// isas.inc is written by CMakeLists.txt: BUILT(name) or LEFT_OUT(name, why), from the narrowest to the widest.
#define OPKIT_ISA_BUILT(isa) extern const Table isa;
#define OPKIT_ISA_LEFT_OUT(isa, why)
#include "isas.inc"
#undef OPKIT_ISA_BUILT
#undef OPKIT_ISA_LEFT_OUT

namespace {

struct Row {
    const char* name;
    const Table* table;      // null: left out of the build
    const char* left_out;    // why
};

const Row kRows[] = {
#define OPKIT_ISA_BUILT(isa) {#isa, &isa, ""},
#define OPKIT_ISA_LEFT_OUT(isa, why) {#isa, nullptr, why},
#include "isas.inc"
};

bool has_feature(const std::string& name) {
    for (const auto& found : {detect_x86(), detect_arm()})
        for (const Feature& feature : found)
            if (feature.name == name) return feature.usable;
    return false;
}

std::string obstacle(const Row& row) {
    if (!row.table) return std::string("it was left out of this build: ") + row.left_out;
    for (const char* const* feature = row.table->features; *feature; ++feature)
        if (!has_feature(*feature)) return std::string("this processor or its operating system has no ") + *feature;
    if (row.table->permitted && !row.table->permitted()) return "the operating system does not permit it to this process";
    return "";
}

void take(Choice& choice, const Table& table) {
    size_t row = 0;
    if (table.pair_rows) choice.kernels.pair_rows = table.pair_rows;
#define OPKIT_ISA_TAKE(kernel, parameters)                                       \
    if (table.kernel) {                                                          \
        choice.kernels.kernel = table.kernel;                                    \
        choice.variants[row].second = table.name;                                \
    }                                                                            \
    ++row;
    OPKIT_ISA_KERNELS(OPKIT_ISA_TAKE)
#undef OPKIT_ISA_TAKE
}

std::vector<Choice> make_choices() {
    std::vector<Choice> all;
    Choice choice{};
#define OPKIT_ISA_NAME(kernel, parameters) choice.variants.emplace_back(#kernel, "");
    OPKIT_ISA_KERNELS(OPKIT_ISA_NAME)
#undef OPKIT_ISA_NAME
    for (const Row& row : kRows) {
        choice.cap = row.name;
        choice.built = row.table != nullptr;
        choice.obstacle = obstacle(row);
        if (choice.obstacle.empty()) take(choice, *row.table);
        all.push_back(choice);
    }
    return all;
}

}  // namespace

const std::vector<Choice>& choices() {
    static const std::vector<Choice> all = make_choices();
    return all;
}

const Choice& choose(const std::string& cap) {
    if (cap.empty()) return choices().back();
    std::string known;
    for (const Choice& choice : choices()) {
        if (choice.cap == cap) return choice;
        known += (known.empty() ? "" : ", ") + choice.cap;
    }
    throw std::invalid_argument("'" + cap + "' is no instruction set of this architecture that opkit has kernels for: " +
                                known);
}

}  // namespace opkit::isa
