#include "archive.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "sha256.hpp"

namespace opkit::model {
namespace {

constexpr int64_t kFormat = 4;
constexpr size_t kChunk = size_t{1} << 24;  // bytes of weights that have a sum of their own
const std::string kComment = "opkit model, sha256 ";
const char* const kWeights = "weights.safetensors";

// A little-endian number at a place of the file. Throws std::runtime_error where the file ends before.
template <class T>
T number(Bytes file, size_t at) {
    if (at > file.size || file.size - at < sizeof(T)) throw std::runtime_error("it is cut off");
    T value;
    std::memcpy(&value, file.data + at, sizeof value);
    return value;
}

Bytes part(Bytes of, uint64_t begin, uint64_t size) {
    if (begin > of.size || size > of.size - begin) throw std::runtime_error("it is cut off");
    return {of.data + begin, size};
}

}  // namespace

Archive::Archive(const std::string& path) : path_(path) {
    try {
        map();
        read_directory();
        const Bytes text = member("manifest.json");
        if (comment_ != kComment + sha256(text.data, text.size)) throw std::runtime_error("its manifest has another sha256");
        manifest_text_ = text;
        manifest_ = Json::parse(text.data, text.size);
        if (manifest_.at("format").integer() != kFormat)
            throw std::runtime_error("it has the format " + std::to_string(manifest_.at("format").integer()) +
                                     ", and this opkit reads " + std::to_string(kFormat) + ". Export the model again");
    } catch (...) {
        if (file_.data != nullptr) munmap(const_cast<char*>(file_.data), file_.size);
        throw;
    }
}

Archive::~Archive() { munmap(const_cast<char*>(file_.data), file_.size); }

void Archive::map() {
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::runtime_error(std::string("it cannot be opened: ") + std::strerror(errno));
    struct stat status = {};
    void* data = MAP_FAILED;
    if (fstat(file, &status) == 0 && status.st_size > 0)
        data = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) throw std::runtime_error("it is no saved model: it cannot be mapped into memory");
    file_ = {static_cast<const char*>(data), static_cast<size_t>(status.st_size)};
}

// The directory of a zip file is at its end (PKWARE's APPNOTE, 4.3.12 to 4.3.16).
void Archive::read_directory() {
    const size_t comment = kComment.size() + 64, last = 22 + comment;
    if (file_.size < last || number<uint32_t>(file_, file_.size - last) != 0x06054b50 ||
        std::memcmp(file_.data + file_.size - comment, kComment.data(), kComment.size()) != 0)
        throw std::runtime_error("it is no saved model, or it is cut off");
    comment_.assign(file_.data + file_.size - comment, comment);
    const size_t end = file_.size - last;
    uint64_t count = number<uint16_t>(file_, end + 10), at = number<uint32_t>(file_, end + 16);
    if (end >= 20 && number<uint32_t>(file_, end - 20) == 0x07064b50) {  // zip64
        const uint64_t wide = number<uint64_t>(file_, end - 12);
        if (number<uint32_t>(file_, wide) != 0x06064b50) throw std::runtime_error("its directory is damaged");
        count = number<uint64_t>(file_, wide + 32);
        at = number<uint64_t>(file_, wide + 48);
    }
    for (; count > 0; --count) {
        if (number<uint32_t>(file_, at) != 0x02014b50) throw std::runtime_error("its directory is damaged");
        const uint16_t method = number<uint16_t>(file_, at + 10), name = number<uint16_t>(file_, at + 28);
        const uint16_t extra = number<uint16_t>(file_, at + 30), remark = number<uint16_t>(file_, at + 32);
        uint64_t packed = number<uint32_t>(file_, at + 20), size = number<uint32_t>(file_, at + 24),
                 header = number<uint32_t>(file_, at + 42);
        const Bytes named = part(file_, at + 46, name);
        for (uint64_t field = at + 46 + name, stop = field + extra; field + 4 <= stop;) {
            uint64_t value = field + 4;
            if (number<uint16_t>(file_, field) == 1)
                for (uint64_t* each : {&size, &packed, &header})
                    if (*each == 0xffffffff) *each = number<uint64_t>(file_, value), value += 8;
            field += 4 + number<uint16_t>(file_, field + 2);
        }
        if (method != 0 || packed != size) throw std::runtime_error("its members are compressed");
        if (number<uint32_t>(file_, header) != 0x04034b50) throw std::runtime_error("its directory is damaged");
        const uint64_t begin = header + 30 + number<uint16_t>(file_, header + 26) + number<uint16_t>(file_, header + 28);
        if (!members_.emplace(std::string(named.data, named.size), part(file_, begin, size)).second)
            throw std::runtime_error("two of its members have one name");
        at += 46 + name + extra + remark;
    }
}

Bytes Archive::member(const std::string& name) const {
    const auto found = members_.find(name);
    if (found == members_.end()) throw std::runtime_error("it has no " + name);
    return found->second;
}

Bytes Archive::read(const std::string& name) const {
    const Bytes bytes = member(name);
    const Json& listed = manifest_.at("members").at(name);
    if (static_cast<int64_t>(bytes.size) != listed.at(size_t{0}).integer() ||
        sha256(bytes.data, bytes.size) != listed.at(1).text())
        throw std::runtime_error(name + " has another sha256 than its manifest says");
    return bytes;
}

Json Archive::read_json(const std::string& name) const {
    const Bytes text = read(name);
    return Json::parse(text.data, text.size);
}

void Archive::check_sums(Bytes bytes, const std::vector<Json>& sums, unsigned threads) const {
    const size_t chunks = (bytes.size + kChunk - 1) / kChunk;
    if (sums.size() != chunks + 1) throw std::runtime_error("its weights have another size than its manifest says");
    std::vector<std::string> expected;
    for (size_t i = 0; i < chunks; ++i) expected.push_back(sums[i + 1].text());
    std::atomic<size_t> next{0};
    std::atomic<bool> right{true};
    const auto work = [&] {
        for (size_t i; (i = next++) < chunks;)
            if (sha256(bytes.data + i * kChunk, std::min(kChunk, bytes.size - i * kChunk)) != expected[i]) right = false;
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads && i < chunks; ++i) others.emplace_back(work);
    work();
    for (std::thread& each : others) each.join();
    if (!right) throw std::runtime_error("its weights have another sha256 than its manifest says");
}

std::unordered_map<std::string, Weight> Archive::weights(bool verify, unsigned threads) const {
    const Bytes bytes = member(kWeights);
    const std::vector<Json>& listed = manifest_.at("members").at(kWeights).items();
    if (listed.empty() || static_cast<int64_t>(bytes.size) != listed[0].integer())
        throw std::runtime_error("its weights have another size than its manifest says");
    if (verify) check_sums(bytes, listed, threads);
    const uint64_t length = number<uint64_t>(bytes, 0);
    const Bytes text = part(bytes, 8, length), data = part(bytes, 8 + length, bytes.size - 8 - length);
    std::unordered_map<std::string, Weight> found;
    const Json header = Json::parse(text.data, text.size);
    for (const auto& [name, entry] : header.fields()) {
        const std::vector<int64_t> offsets = entry.at("data_offsets").integers();
        if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0])
            throw std::runtime_error("the weight " + name + " is not within the file");
        const auto begin = static_cast<uint64_t>(offsets[0]);
        found[name] = {entry.at("dtype").text(), entry.at("shape").integers(),
                       part(data, begin, static_cast<uint64_t>(offsets[1]) - begin)};
    }
    return found;
}

}  // namespace opkit::model
