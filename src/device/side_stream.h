// SideStream: a second stream of a rank, whose work runs beside the work of the rank's main stream. fork()
// and join() only enqueue events, so that both streams' work can be captured into one graph.
#pragma once

#include "device/event.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

class SideStream {
 public:
  // Makes the stream and its events on the current GPU. Fails as Stream::make() does.
  static Result<SideStream> make();

  // Makes work enqueued on the returned side stream from now on wait for all work enqueued on `main` so far.
  // The work belongs to main's layer and has main's peers. Call join() before the next fork(), before the end
  // of a capture of `main`, and before `main` is synchronized.
  Stream& fork(Stream& main);
  // Makes work enqueued on `main` from now on wait for all work on the side stream, and moves the side
  // stream's error, if any, to `main`.
  void join(Stream& main);

  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
  Event forked_, joined_;
};

}  // namespace fp4moe
