// The constants of a program, by the records of opkit/ship/weights.py.
#pragma once

#include <unordered_map>

#include "archive.hpp"
#include "device.hpp"
#include "tensor.hpp"

namespace opkit::model {

class Weights {
public:
    Weights(const Archive& archive, bool verify, const Device& device);

    // The constant of a record on the device: in the file's memory, or, where that is elsewhere or stored narrower, made once.
    // Throws std::runtime_error where the record does not fit the weights.
    const Tensor& constant(const Json& record);

    // The same for a weight that programs write to: a copy, which all entries of a model share.
    const Tensor& state(const Json& record);

private:
    Tensor make(const Json& record) const;
    Tensor copied(const Tensor& from) const;  // to the device
    const Weight& find(const std::string& name, int32_t* dtype) const;

    Device device_;
    std::unordered_map<std::string, Weight> weights_;
    std::unordered_map<std::string, Tensor> made_, states_;
};

}  // namespace opkit::model
