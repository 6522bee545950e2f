// SHA-256 (FIPS 180-4), with the processor's instructions for it where it has them.
#pragma once

#include <cstddef>
#include <string>

namespace opkit::model {

// The sum in hexadecimal.
std::string sha256(const void* data, size_t size);

}  // namespace opkit::model
