// JSON as it is read: what a saved model says of itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace opkit::model {

// A value. Each accessor throws std::runtime_error where the value is another, and `at` where there is none.
class Json {
public:
    // Throws std::runtime_error where the text is no JSON, or is nested more than 100 times.
    static Json parse(const char* text, size_t size);

    bool is_null() const { return kind_ == Kind::Null; }
    bool is_text() const { return kind_ == Kind::Text; }
    int64_t integer() const;
    const std::string& text() const;
    const std::vector<Json>& items() const;                           // of an array
    const std::vector<std::pair<std::string, Json>>& fields() const;  // of an object, in their order
    const Json* find(const std::string& name) const;                  // null where an object has no such field
    const Json& at(const std::string& name) const;
    const Json& at(size_t number) const;
    std::vector<int64_t> integers() const;  // an array of them

private:
    friend class Parser;
    enum class Kind { Null, Bool, Integer, Float, Text, Array, Object };
    const Json& require(Kind kind, const char* what) const;
    Kind kind_ = Kind::Null;
    int64_t integer_ = 0;  // of a bool: 0 or 1
    std::string text_;
    std::vector<Json> items_;
    std::vector<std::pair<std::string, Json>> fields_;
};

}  // namespace opkit::model
