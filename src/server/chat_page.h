// The chat page: page/chat.html, one file without anything from elsewhere, built into the binary.
#pragma once

#include "server/http.h"

namespace fp4moe {

// page/embed.cmake writes them.
extern const char kChatPage[];
// Sources of script and style that the page may run: its own, by their hashes.
extern const char kChatPageScript[];
extern const char kChatPageStyle[];

HttpResponse chat_page();

}  // namespace fp4moe
