-- One POST over and over, and what came of it as a line of JSON: wrk -s wrk.lua URL -- BODY_FILE [NAME VALUE]...

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  for at = 2, #args, 2 do
    wrk.headers[args[at]] = args[at + 1]
  end
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"seconds":%f,"p50_us":%f,"p99_us":%f,"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read, errors.write, errors.timeout, errors.status))
end
