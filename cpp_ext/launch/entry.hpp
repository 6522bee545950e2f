// How calls of one kind are launched: a binary, its grid, and where each of its parameters comes from.
#pragma once

#include <memory>
#include <optional>
#include <tuple>

#include "binary.hpp"
#include "buffer.hpp"
#include "packing.hpp"
#include "tensor_map.hpp"

namespace opkit::launch {

class Entry {
public:
    using GivenParameter = std::tuple<std::string, int64_t, int64_t>;  // kind, source, detail

    // Throws std::invalid_argument where the parts do not fit each other.
    Entry(std::shared_ptr<const Binary> binary, const Extent& grid, const std::vector<GivenParameter>& parameters,
          std::vector<MapLayout> maps, std::vector<int64_t> zeroed, std::optional<Extent> chunk);

    // Throws std::invalid_argument where it takes from a source what that has not.
    void check(const Sources& sources) const;

    // Each throws std::runtime_error, with the driver's message.
    void launch(const Frame& frame) const { prepare(frame), run(frame); }
    void prepare(const Frame& frame) const;  // zeroes what is to be zeroed
    void run(const Frame& frame) const;

    const Binary& binary() const { return *binary_; }
    bool empty() const { return empty_; }  // nothing to launch

private:
    void zero(const Frame& frame, size_t source) const;
    void check_written(const Frame& frame) const;
    void check_parameters(const Frame& frame) const;
    Buffer scratch(const Frame& frame, const Scratch& scratch) const;
    void add_attributes();
    void run_pieces(const Frame& frame, Packed& packed) const;
    void run_piece(const Frame& frame, const Extent& blocks, Packed& packed) const;
    [[noreturn]] void fail(const Extent& blocks, const char* reason) const;

    std::shared_ptr<const Binary> binary_;
    Extent grid_, piece_;
    bool empty_, chunked_;
    std::vector<Parameter> parameters_;
    std::vector<std::unique_ptr<TensorMap>> maps_;
    std::vector<size_t> zeroed_;
    std::vector<LaunchAttribute> attributes_;
    mutable std::atomic<bool> checked_{false};
};

}  // namespace opkit::launch
