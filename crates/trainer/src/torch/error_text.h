// Messages of errors: exceptions must not reach Rust.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>

#include <c10/util/Exception.h>

namespace baton {

// Buffer for an error message, all zero; error_text.rs has the same declaration.
struct Message {
    char *text;
    size_t len;
};

// Returns false, with a message, if `body` throws.
template <typename Body> bool without_exceptions(Message message, Body body) {
    try {
        body();
        return true;
    } catch (const c10::Error &error) {
        std::strncpy(message.text, error.what_without_backtrace(), message.len - 1);
    } catch (const std::exception &error) {
        std::strncpy(message.text, error.what(), message.len - 1);
    } catch (...) {
        std::strncpy(message.text, "unknown exception", message.len - 1);
    }
    return false;
}

} // namespace baton
