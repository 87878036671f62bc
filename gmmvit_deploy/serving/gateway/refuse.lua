-- gmmvit_refuse, which HAProxy runs for the gateway: refuse a request after its body was read.
--
-- HAProxy 2.6 ends an HTTP/2 stream with RST_STREAM(CANCEL) if it answers before the end of the body: gRPC clients
-- then report CANCELLED, and never see the status. A client of HTTP/1 that still sends may see a closed connection.
-- This service reads and drops the body, and answers afterwards. A body that is larger than MAX_BYTES, or takes longer
-- than MAX_S, is left unread.
--
-- txn.refused: "STATUS MESSAGE"; STATUS is a status of HTTP or, if txn.protocol is "grpc", of gRPC.

local MAX_BYTES = { known = 64 * 1024 * 1024, unknown = 1024 * 1024 } -- bytes of a client with a key, and of a stranger
local MAX_S = { known = 30, unknown = 5 }
local PIECE = 65536

local function drop_body(applet)
  local client = applet:get_var("txn.client") and "known" or "unknown"
  local dropped, started = 0, core.now().sec
  while dropped < MAX_BYTES[client] and core.now().sec - started <= MAX_S[client] do
    local piece = applet:receive(PIECE)
    if piece == nil or #piece == 0 then return end
    dropped = dropped + #piece
  end
end

core.register_service("gmmvit_refuse", "http", function(applet)
  drop_body(applet)
  local status, message = string.match(applet:get_var("txn.refused"), "^(%d+) (.*)$")
  if applet:get_var("txn.protocol") == "grpc" then
    applet:set_status(200)
    applet:add_header("content-type", "application/grpc")
    applet:add_header("grpc-status", status)
    applet:add_header("grpc-message", message)
    applet:add_header("content-length", "0")
    applet:start_response()
    return
  end
  local begin, ending = applet:get_var("txn.error_begin") or "", applet:get_var("txn.error_end") or ""
  local body = '{"error":' .. begin .. '"' .. message .. '"' .. ending .. '}'
  applet:set_status(tonumber(status))
  applet:add_header("content-type", "application/json")
  applet:add_header("content-length", tostring(#body))
  if status == "401" then applet:add_header("www-authenticate", "Bearer") end
  if status == "503" then applet:add_header("retry-after", "1") end
  applet:start_response()
  if applet.method ~= "HEAD" then applet:send(body) end
end)
