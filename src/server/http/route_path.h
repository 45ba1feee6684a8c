// Paths that name the same route: with and without "/v1" in front, and with and without one '/' at the end.
#pragma once

#include <string>
#include <string_view>

namespace fp4moe {

// Whether a request's path names the route. A route that ends in '/' has all paths below it.
bool is_route(std::string_view route, std::string_view path);

// The part of `path` below a route that ends in '/', percent-decoded, or "" if there is no such part. A '%'
// without two hexadecimal digits stays as it is.
std::string path_tail(std::string_view route, std::string_view path);

}  // namespace fp4moe
