#include "moe/plan/scheme.h"

namespace fp4moe {
namespace {

const char* choice_name(ActScaleChoice choice) {
  switch (choice) {
    case ActScaleChoice::kScalar:
      return "scalar";
    case ActScaleChoice::kPerExpert:
      return "per-expert";
    case ActScaleChoice::kPerToken:
      return "per-token";
  }
  return "unknown";
}

}  // namespace

const char* scheme_name(Scheme scheme) {
  switch (scheme) {
    case Scheme::kW4A16:
      return "w4a16";
    case Scheme::kW4A4:
      return "w4a4";
    case Scheme::kW4A8:
      return "w4a8";
  }
  return "unknown";
}

std::string numerics_text(const Numerics& n) {
  if (n.is_fp8()) return std::string(scheme_name(n.scheme)) + " (FP8 tokens)";
  if (n.scheme != Scheme::kW4A4) return scheme_name(n.scheme);
  return std::string(scheme_name(n.scheme)) + " (" + choice_name(n.a1) + " a1, " + choice_name(n.a2) +
         " a2, intermediate " +
         (n.intermediate == IntermediateRounding::kDirect ? "quantised from f32" : "through bf16") + ")";
}

}  // namespace fp4moe
