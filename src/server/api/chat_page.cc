#include "server/api/chat_page.h"

namespace fp4moe {

// The CSP allows the page's own script and style and requests to this server, and forbids framing.
HttpResponse chat_page() {
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.body = kChatPage;
  response.extra_headers = std::string("Content-Security-Policy: default-src 'none'; script-src ") +
                           kChatPageScript + "; style-src " + kChatPageStyle +
                           "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                           "frame-ancestors 'none'\r\n"
                           "X-Content-Type-Options: nosniff\r\n"
                           "Referrer-Policy: no-referrer\r\n"
                           "Cache-Control: no-cache\r\n";
  return response;
}

}  // namespace fp4moe
