-- wrk posts a file, and prints the answers a second. wrk SETTINGS -s post.lua URL -- FILE
--
-- wrk divides by its whole time. A service that answers in batches then looks slower in a short run, so the time here
-- ends with the last answer.

local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long us; } moment; int gettimeofday(moment *now, void *zone);")
local now = ffi.new("moment")
local threads = {}

local function seconds()
  ffi.C.gettimeofday(now, nil)
  return tonumber(now.s) + tonumber(now.us) / 1e6
end

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  request_text = wrk.format("POST", nil, nil, file:read("*a"))
  file:close()
  answers, failures = 0, 0
end

function request()
  first = first or seconds()
  return request_text
end

function response(status)
  if status == 200 then answers = answers + 1 else failures = failures + 1 end
  last = seconds()
end

function done(summary)
  local thread = threads[1]
  local errors = summary.errors
  local failed = thread:get("failures") + errors.connect + errors.read + errors.write + errors.timeout
  local time = (thread:get("last") or 0) - (thread:get("first") or 0)
  print(string.format('{"answers": %d, "failed": %d, "seconds": %.6f}', thread:get("answers"), failed, time))
end
