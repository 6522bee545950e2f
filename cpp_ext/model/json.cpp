#include "json.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace opkit::model {

class Parser {
public:
    Parser(const char* text, size_t size) : at_(text), end_(text + size) {}

    Json whole() {
        Json value = this->value(0);
        blank();
        if (at_ != end_) fail("something follows its end");
        return value;
    }

private:
    [[noreturn]] static void fail(const char* what) { throw std::runtime_error(std::string("no JSON: ") + what); }

    void blank() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    }

    char peek() {
        blank();
        if (at_ == end_) fail("it ends too early");
        return *at_;
    }

    bool take(char expected) {
        if (peek() != expected) return false;
        ++at_;
        return true;
    }

    void require(char expected) {
        if (!take(expected)) fail("a bracket, comma or colon is missing");
    }

    bool word(const char* text) {
        const size_t length = std::strlen(text);
        if (static_cast<size_t>(end_ - at_) < length || std::memcmp(at_, text, length) != 0) return false;
        at_ += length;
        return true;
    }

    Json value(int depth) {
        if (depth > 100) fail("it is nested too deeply");
        Json found;
        switch (peek()) {
            case '{': object(found, depth); break;
            case '[': array(found, depth); break;
            case '"':
                found.kind_ = Json::Kind::Text;
                found.text_ = string();
                break;
            default: scalar(found);
        }
        return found;
    }

    void object(Json& found, int depth) {
        found.kind_ = Json::Kind::Object;
        require('{');
        if (take('}')) return;
        do {
            if (peek() != '"') fail("a field has no name");
            std::string name = string();
            require(':');
            found.fields_.emplace_back(std::move(name), value(depth + 1));
        } while (take(','));
        require('}');
    }

    void array(Json& found, int depth) {
        found.kind_ = Json::Kind::Array;
        require('[');
        if (take(']')) return;
        do found.items_.push_back(value(depth + 1));
        while (take(','));
        require(']');
    }

    void scalar(Json& found) {
        if (word("null")) return;
        if (word("NaN") || word("Infinity") || word("-Infinity")) {  // as Python writes them; nothing here needs their value
            found.kind_ = Json::Kind::Float;
            return;
        }
        const bool is_true = word("true");
        if (is_true || word("false")) {
            found.kind_ = Json::Kind::Bool;
            found.integer_ = is_true;
            return;
        }
        const char* begin = at_;
        while (at_ != end_ && std::strchr("+-.0123456789eE", *at_) != nullptr && *at_ != 0) ++at_;
        const std::string digits(begin, at_);
        if (digits.empty()) fail("a value is none");
        char* stop = nullptr;
        errno = 0;
        found.integer_ = std::strtoll(digits.c_str(), &stop, 10);
        found.kind_ = *stop == 0 && errno == 0 ? Json::Kind::Integer : Json::Kind::Float;
        if (found.kind_ == Json::Kind::Integer) return;
        std::strtod(digits.c_str(), &stop);
        if (*stop != 0) fail("a number is none");
    }

    std::string string() {
        std::string found;
        ++at_;
        while (true) {
            if (at_ == end_) fail("a string does not end");
            const char c = *at_++;
            if (c == '"') return found;
            if (c == '\\')
                escape(found);
            else
                found += c;
        }
    }

    void escape(std::string& found) {
        if (at_ == end_) fail("a string does not end");
        const char c = *at_++;
        const char *known = "\"\\/bfnrt", *place = std::strchr(known, c);
        if (c != 0 && place != nullptr)
            found += "\"\\/\b\f\n\r\t"[place - known];
        else if (c == 'u')
            character(found);
        else
            fail("a string has an unknown escape");
    }

    uint32_t unit() {
        if (end_ - at_ < 4) fail("a string does not end");
        char* stop = nullptr;
        const std::string digits(at_, at_ + 4);
        const uint32_t found = static_cast<uint32_t>(std::strtoul(digits.c_str(), &stop, 16));
        if (*stop != 0) fail("a string has an unknown escape");
        at_ += 4;
        return found;
    }

    void character(std::string& found) {
        uint32_t code = unit();
        if (code >= 0xD800 && code < 0xDC00 && word("\\u")) code = 0x10000 + ((code - 0xD800) << 10) + (unit() & 0x3FF);
        if (code < 0x80) {
            found += static_cast<char>(code);
        } else if (code < 0x800) {
            found += static_cast<char>(0xC0 | code >> 6);
            found += static_cast<char>(0x80 | (code & 0x3F));
        } else {
            if (code < 0x10000) {
                found += static_cast<char>(0xE0 | code >> 12);
            } else {
                found += static_cast<char>(0xF0 | code >> 18);
                found += static_cast<char>(0x80 | (code >> 12 & 0x3F));
            }
            found += static_cast<char>(0x80 | (code >> 6 & 0x3F));
            found += static_cast<char>(0x80 | (code & 0x3F));
        }
    }

    const char *at_, *end_;
};

Json Json::parse(const char* text, size_t size) { return Parser(text, size).whole(); }

const Json& Json::require(Kind kind, const char* what) const {
    if (kind_ != kind) throw std::runtime_error(std::string("a value is no ") + what);
    return *this;
}

int64_t Json::integer() const { return require(Kind::Integer, "integer").integer_; }
const std::string& Json::text() const { return require(Kind::Text, "text").text_; }
const std::vector<Json>& Json::items() const { return require(Kind::Array, "array").items_; }
const std::vector<std::pair<std::string, Json>>& Json::fields() const { return require(Kind::Object, "object").fields_; }

const Json* Json::find(const std::string& name) const {
    for (const auto& [key, value] : fields())
        if (key == name) return &value;
    return nullptr;
}

const Json& Json::at(const std::string& name) const {
    const Json* found = find(name);
    if (found == nullptr) throw std::runtime_error("there is no " + name);
    return *found;
}

const Json& Json::at(size_t number) const {
    if (number >= items().size()) throw std::runtime_error("an array has too few items");
    return items()[number];
}

std::vector<int64_t> Json::integers() const {
    std::vector<int64_t> found;
    for (const Json& each : items()) found.push_back(each.integer());
    return found;
}

}  // namespace opkit::model
