#include "device/side_stream.h"

#include <utility>

namespace fp4moe {

Result<SideStream> SideStream::make() {
  SideStream side;
  FP4MOE_ASSIGN_OR_RETURN(side.stream_, Stream::make());
  FP4MOE_ASSIGN_OR_RETURN(side.forked_, Event::make());
  FP4MOE_ASSIGN_OR_RETURN(side.joined_, Event::make());
  return side;
}

Stream& SideStream::fork(Stream& main) {
  stream_.begin_layer(main.layer());
  if (main.has_peers()) stream_.set_has_peers();
  forked_.record(main);
  forked_.hold(stream_);
  return stream_;
}

void SideStream::join(Stream& main) {
  joined_.record(stream_);
  joined_.hold(main);
  if (Status failure = stream_.take_failure(); !failure.ok()) main.keep(std::move(failure));
}

}  // namespace fp4moe
