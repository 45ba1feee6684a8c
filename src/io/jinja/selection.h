// AttributePath: the attribute argument of map, selectattr, sort, sum and similar filters, such as "a.b.0".
#pragma once

#include <vector>

#include "io/jinja/callable.h"

namespace fp4moe::jinja {

class AttributePath {
 public:
  // Takes the call's argument `parameter`; if that is absent or None, the path selects the item itself.
  // `fallback` (not owned) replaces undefined values along the path.
  AttributePath(Call& call, size_t parameter, const Value* fallback = nullptr);
  AttributePath(Call& call, const Value& attribute, const Value* fallback = nullptr);
  Value of(const Value& item) const;

 private:
  void add(const Value& attribute);

  Call& call_;
  std::vector<Value> parts_;
  const Value* fallback_;
};

}  // namespace fp4moe::jinja
