// Which kernels run here: the tables of the ISAs in this build, against what the processor has. Chosen once, at first use.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "table.hpp"

namespace opkit::isa {

struct Choice {
    std::string cap;      // the widest ISA allowed
    std::string obstacle; // why that ISA itself cannot run here; empty if it can
    bool built;
    Table kernels;        // no pointer is null
    std::vector<std::pair<std::string, std::string>> variants;  // kernel, the ISA that it is taken from
};

// One choice for every ISA of this architecture, from the narrowest to the widest.
const std::vector<Choice>& choices();

// The best kernels within `cap`, an ISA's name or empty for no limit; throws std::invalid_argument on an unknown name.
const Choice& choose(const std::string& cap);

}  // namespace opkit::isa
