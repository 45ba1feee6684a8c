// AttributePath: the attribute argument of map, selectattr, sort, sum and their kin, such as "a.b.0".
#pragma once

#include <vector>

#include "io/jinja/callable.h"

namespace fp4moe::jinja {

class AttributePath {
 public:
  // From the call's argument `parameter`; the item itself if that is absent or None. `fallback`, not owned,
  // stands for what is undefined on the way.
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
