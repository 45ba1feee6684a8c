// Fields of other servers' generation requests that this server does not support.
#pragma once

#include <string_view>

#include "server/json.h"

namespace fp4moe {

// Refuses fields that would change the output, unless they have the value that does not, and accepts fields
// that cannot change it, so that neither depends on --strict-requests. Leaves out the field `except`.
void read_foreign_fields(Fields& fields, std::string_view except = {});

}  // namespace fp4moe
