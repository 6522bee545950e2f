// The container of a saved model, mapped into memory; opkit/ship/archive.py writes it, and docs/models.md describes it.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "json.hpp"

namespace opkit::model {

// Bytes of the file.
struct Bytes {
    const char* data = nullptr;
    size_t size = 0;
};

// A tensor of the file, contiguous.
struct Weight {
    std::string dtype;  // as safetensors names it
    std::vector<int64_t> shape;
    Bytes bytes;
};

// Everything throws std::runtime_error that says what is wrong with the file.
class Archive {
public:
    explicit Archive(const std::string& path);
    ~Archive();
    Archive(const Archive&) = delete;
    Archive& operator=(const Archive&) = delete;

    const std::string& path() const { return path_; }
    const Json& manifest() const { return manifest_; }
    Bytes manifest_text() const { return manifest_text_; }

    // A member, whose sha256 is checked.
    Bytes read(const std::string& name) const;
    Json read_json(const std::string& name) const;

    // The weights by name. With `verify`, their sums are checked by so many threads, which reads all of them.
    std::unordered_map<std::string, Weight> weights(bool verify, unsigned threads) const;

private:
    void map();
    void read_directory();
    Bytes member(const std::string& name) const;
    void check_sums(Bytes bytes, const std::vector<Json>& sums, unsigned threads) const;

    std::string path_;
    Bytes file_;
    std::string comment_;
    std::unordered_map<std::string, Bytes> members_;
    Bytes manifest_text_;
    Json manifest_;
};

}  // namespace opkit::model
