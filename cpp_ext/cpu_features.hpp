// What the processor can run. One file an instruction set architecture implements detect(); the others compile to nothing.
#pragma once

#include <string>
#include <vector>

namespace opkit {

struct Feature {
    const char* name;
    bool usable;  // the processor has it and the operating system saves its registers
};

std::vector<Feature> detect_x86();
std::vector<Feature> detect_arm();

std::string x86_vendor();  // what CPUID says, as "GenuineIntel"; empty on other processors

}  // namespace opkit
