-- Reserves in all scopes or in none, as `Quota::reserve`.
-- KEYS: the reservation, then for each scope its sums and its running requests.
-- ARGV: id, tokens, lease in ms, time to the deadline in ms, then for each scope its four limits, -1 for none.
-- Returns {1} or {0, scope, kind, used, needed, retry in ms or -1 for never}, then for each scope the requests and tokens of the last
-- minute, and the time until they are none.

local NAMES = { 'r', 't', 'd' }
local CONCURRENT, CONCURRENT_RETRY = 4, 1000

local id, tokens, lease, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
-- It was cancelled before it came.
if redis.call('EXISTS', KEYS[1]) == 1 then return { 2 } end

local scopes, worst = {}, nil
for at = 1, (#KEYS - 1) / 2 do
  local scope, running = read(KEYS[2 * at], now), KEYS[2 * at + 1]
  scopes[at] = scope
  redis.call('ZREMRANGEBYSCORE', running, '-inf', whole(now))
  local used = { scope.R, scope.T, scope.D, redis.call('ZCARD', running) }
  local needed, own = { 1, tokens, tokens, 1 }, nil
  for kind = 1, 4 do
    local limit = tonumber(ARGV[4 * at + kind])
    local over = used[kind] + needed[kind] - limit
    if limit >= 0 and over > 0 then
      local retry = CONCURRENT_RETRY
      if needed[kind] > limit then
        retry = math.huge
      elseif kind ~= CONCURRENT then
        retry = until_freed(scope, now, NAMES[kind], over)
      end
      if not own or own[6] < retry then own = { 0, at, kind, used[kind], needed[kind], retry } end
    end
  end
  if own and (not worst or worst[6] <= own[6]) then worst = own end
end

local answer = worst or { 1 }
if worst then
  if worst[6] == math.huge then worst[6] = -1 end
else
  -- One slot for all: it is what the settlement goes by.
  local minute, day = math.floor(now / MINUTE), math.floor(now / DAY)
  for _, scope in ipairs(scopes) do minute, day = math.max(minute, scope.minute), math.max(day, scope.day) end
  for at, scope in ipairs(scopes) do
    add(scope, minute, day, tokens)
    run(KEYS[2 * at + 1], id, now + lease, now)
  end
  note(KEYS[1], minute, day, tokens, keep)
end
for _, scope in ipairs(scopes) do
  answer[#answer + 1] = scope.R
  answer[#answer + 1] = scope.T
  answer[#answer + 1] = until_empty(scope, now)
end
return answer
