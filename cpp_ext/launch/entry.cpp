#include "entry.hpp"

#include <algorithm>
#include <stdexcept>

namespace opkit::launch {
namespace {

std::string text_of(const Extent& extent) {
    return "(" + std::to_string(extent[0]) + ", " + std::to_string(extent[1]) + ", " + std::to_string(extent[2]) + ")";
}

void require(bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(message);
}

Extent smaller(const Extent& a, const Extent& b) {
    return {std::min(a[0], b[0]), std::min(a[1], b[1]), std::min(a[2], b[2])};
}

void check_grid(const Extent& grid, const Extent& piece, const Extent& cluster) {
    for (size_t axis = 0; axis < 3; axis++) {
        require(grid[axis] >= 0, "the grid " + text_of(grid) + " is negative");
        require(piece[axis] > 0 || grid[axis] == 0, "the chunk " + text_of(piece) + " of a grid must be positive");
        require(piece[axis] <= INT32_MAX / cluster[axis],
                "the grid " + text_of(piece) + " is larger than a GPU takes; launch it in chunks");
    }
}

void check_parameter(const Parameter& parameter, const Extent& grid, size_t maps) {
    const std::string name = std::string("a parameter of the kind ") + parameter.name;
    if (parameter.kind == Kind::kMap)
        require(parameter.source >= 0 && static_cast<size_t>(parameter.source) < maps,
                name + " asks for a map that is not there");
    if (!parameter.of_axis()) return;
    require(parameter.detail >= 0 && parameter.detail < 3, name + " has an axis from 0 to 2");
    require(parameter.bytes == 8 || grid[static_cast<size_t>(parameter.detail)] <= INT32_MAX,
            name + " has 32 bits, too few for the grid " + text_of(grid));
}

bool holds_elements(const opk_tensor* tensor) {
    return tensor != nullptr &&
           std::find(tensor->sizes, tensor->sizes + tensor->rank, 0) == tensor->sizes + tensor->rank;
}

}  // namespace

Entry::Entry(std::shared_ptr<const Binary> binary, const Extent& grid, const std::vector<GivenParameter>& parameters,
             std::vector<MapLayout> maps, std::vector<int64_t> zeroed, std::optional<Extent> chunk)
    : binary_(std::move(binary)),
      grid_(grid),
      piece_(chunk ? smaller(grid, *chunk) : grid),
      empty_(std::find(grid.begin(), grid.end(), 0) != grid.end()),
      chunked_(piece_ != grid),
      zeroed_(zeroed.begin(), zeroed.end()) {
    check_grid(grid, piece_, binary_->properties().cluster);
    require(maps.size() <= kMostMaps, "a kernel takes at most 16 tensor descriptors");
    require(maps.empty() || !binary_->driver().hip(), "HIP has no tensor descriptors of this kind");
    for (const auto& [kind, source, detail] : parameters) {
        parameters_.push_back(parse_parameter(kind, source, detail));
        check_parameter(parameters_.back(), grid, maps.size());
    }
    for (MapLayout& map : maps) maps_.push_back(std::make_unique<TensorMap>(std::move(map)));
    add_attributes();
}

void Entry::add_attributes() {
    const Properties& properties = binary_->properties();
    const bool hip = binary_->driver().hip(), clustered = properties.blocks() > 1;
    const auto add = [&](uint32_t id, Extent value) {
        LaunchAttribute attribute{id, {}, {}};
        for (size_t i = 0; i < 3; i++) attribute.value[i] = static_cast<uint32_t>(value[i]);
        attributes_.push_back(attribute);
    };
    if (properties.pdl && !hip) add(kProgrammaticStreamSerialization, {1, 0, 0});
    if (properties.cooperative && (!hip || clustered)) add(kCooperative, {1, 0, 0});
    if (clustered) add(kClusterDimension, properties.cluster);
    if (clustered && !hip) add(kClusterScheduling, {kSpreadClusters, 0, 0});
}

void Entry::check(const Sources& sources) const {
    for (const Parameter& parameter : parameters_) {
        if (parameter.of_tensor()) require_tensor(sources, parameter.source, parameter.name);
        if (!parameter.of_scalar()) continue;
        const Source& source = source_at(sources, parameter.source);
        require(!source.tensor() && source.role != Role::kText && source.role != Role::kInts,
                std::string(parameter.name) + " asks for a number, and " + source.name + " is none");
    }
    for (const auto& map : maps_) require_tensor(sources, map->layout().source, "a map");
    for (const size_t zeroed : zeroed_) require_tensor(sources, static_cast<int64_t>(zeroed), "zero");
}

// ---- a launch -------------------------------------------------------------------------------------------------------------

void Entry::prepare(const Frame& frame) const {
    if (zeroed_.empty()) return;
    binary_->driver().enter(frame.device);
    for (const size_t source : zeroed_) zero(frame, source);
}

void Entry::zero(const Frame& frame, size_t source) const {
    const opk_tensor* tensor = frame.tensor(source);
    if (!holds_elements(tensor)) return;
    if (!dense(*tensor))
        throw std::runtime_error(
            frame.source(source).name +
            " is to be set to zero before the launch, but there are gaps between its elements; make it contiguous");
    const Driver& driver = binary_->driver();
    driver(driver.fill, reinterpret_cast<uint64_t>(tensor->data), uint8_t{0},
           static_cast<size_t>(extent_bytes(*tensor)), frame.stream);
}

void Entry::run(const Frame& frame) const {
    if (empty_) return check_written(frame);
    const Properties& properties = binary_->properties();
    binary_->driver().enter(frame.device);
    if (!checked_.load(std::memory_order_relaxed)) check_parameters(frame);
    const Buffer used = scratch(frame, properties.scratch), profile = scratch(frame, properties.profile_scratch);
    Packed packed(parameters_.size());
    pack(parameters_, maps_, binary_->driver(), frame, {used.data(), profile.data()}, grid_, packed);
    if (chunked_)
        run_pieces(frame, packed);
    else
        run_piece(frame, grid_, packed);
}

void Entry::check_written(const Frame& frame) const {
    for (size_t i = 0; i < frame.sources->size(); i++) {
        if (!frame.source(i).output || !holds_elements(frame.tensor(i))) continue;
        if (std::find(zeroed_.begin(), zeroed_.end(), i) == zeroed_.end())
            throw std::runtime_error("its grid " + text_of(grid_) + " is empty, so " + frame.source(i).name +
                                     " would be left unwritten");
    }
}

void Entry::check_parameters(const Frame& frame) const {
    const std::vector<size_t> sizes = binary_->parameter_sizes(frame.device);
    const size_t count = parameters_.size();
    if (!sizes.empty() && sizes.size() != count)
        throw std::runtime_error("its compiled function takes " + std::to_string(sizes.size()) + " parameters, and " +
                                 std::to_string(count) + " are given");
    for (size_t i = 0; i < sizes.size(); i++) {
        const Parameter& parameter = parameters_[i];
        const size_t bytes = static_cast<size_t>(parameter.bytes);
        if (parameter.kind == Kind::kConstant ? sizes[i] > sizeof(uint64_t) : sizes[i] != bytes)
            throw std::runtime_error("parameter " + std::to_string(i) + " of its compiled function has " +
                                     std::to_string(sizes[i]) + " bytes, and " + parameter.name + " has " +
                                     std::to_string(bytes));
    }
    checked_.store(true, std::memory_order_relaxed);
}

Buffer Entry::scratch(const Frame& frame, const Scratch& scratch) const {
    if (scratch.bytes == 0) return {};
    const int64_t blocks = piece_[0] * piece_[1] * piece_[2] * binary_->properties().blocks();
    return Buffer(frame.device, blocks * scratch.bytes, scratch.alignment);
}

void Entry::run_pieces(const Frame& frame, Packed& packed) const {
    Extent at;
    for (at[2] = 0; at[2] < grid_[2]; at[2] += piece_[2])
        for (at[1] = 0; at[1] < grid_[1]; at[1] += piece_[1])
            for (at[0] = 0; at[0] < grid_[0]; at[0] += piece_[0]) {
                const Extent left{grid_[0] - at[0], grid_[1] - at[1], grid_[2] - at[2]};
                for (size_t i = 0; i < parameters_.size(); i++)
                    if (parameters_[i].kind == Kind::kOffset)
                        packed.words[i] = static_cast<uint64_t>(at[static_cast<size_t>(parameters_[i].detail)]);
                run_piece(frame, smaller(piece_, left), packed);
            }
}

void Entry::run_piece(const Frame& frame, const Extent& programs, Packed& packed) const {
    const Driver& driver = binary_->driver();
    const Properties& properties = binary_->properties();
    void* function = binary_->function(frame.device);
    const uint32_t x = static_cast<uint32_t>(programs[0] * properties.cluster[0]);
    const uint32_t y = static_cast<uint32_t>(programs[1] * properties.cluster[1]);
    const uint32_t z = static_cast<uint32_t>(programs[2] * properties.cluster[2]);
    const uint32_t threads = static_cast<uint32_t>(properties.threads),
                   shared = static_cast<uint32_t>(properties.shared);
    void** const parameters = packed.pointers.data();
    try {
        if (!attributes_.empty()) {
            const LaunchConfig config{{x, y, z},
                                      {threads, 1, 1},
                                      shared,
                                      frame.stream,
                                      const_cast<LaunchAttribute*>(attributes_.data()),
                                      static_cast<uint32_t>(attributes_.size())};
            driver(driver.launch_extended, &config, function, parameters, static_cast<void**>(nullptr));
        } else if (properties.cooperative) {
            driver(driver.launch_cooperative, function, x, y, z, threads, 1u, 1u, shared, frame.stream, parameters);
        } else {
            driver(driver.launch, function, x, y, z, threads, 1u, 1u, shared, frame.stream, parameters,
                   static_cast<void**>(nullptr));
        }
    } catch (const std::runtime_error& error) {
        fail(programs, error.what());
    }
}

void Entry::fail(const Extent& programs, const char* reason) const {
    const Properties& properties = binary_->properties();
    const std::string cluster = properties.blocks() > 1 ? ", clusters of " + text_of(properties.cluster) : "";
    throw std::runtime_error(std::string(reason) + "; the grid is " + text_of(programs) + cluster + ", a block has " +
                             std::to_string(properties.threads) + " threads and " + std::to_string(properties.shared) +
                             " bytes of shared memory");
}

}  // namespace opkit::launch
