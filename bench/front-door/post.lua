-- For wrk: streamed chats of one turn, no two alike. MODEL, STREAM and MAX_TOKENS come from the environment. Prints a line of JSON.

math.randomseed(os.time())
local number = math.random(1, 1000) * 1000000
local text = "Could you please tell me how long I should bake a loaf of bread with seeds, and which flour is best for it at home?"
local body = string.format('{"model":"%s","max_tokens":%s,"temperature":0,"stream":%s,"messages":[{"role":"user","content":"%%d %s"}]}',
  os.getenv("MODEL"), os.getenv("MAX_TOKENS") or "16", os.getenv("STREAM") or "true", text)

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

request = function()
  number = number + 1
  return wrk.format(nil, nil, nil, string.format(body, number))
end

done = function(summary, latency, _)
  local errors = summary.errors
  io.write(string.format('{"per_s":%.1f,"requests":%d,"failed":%d,"p50_ms":%.2f,"p99_ms":%.2f}\n',
    summary.requests / (summary.duration / 1e6), summary.requests,
    errors.status + errors.connect + errors.read + errors.write + errors.timeout, latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
