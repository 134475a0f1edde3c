-- Reserves in all scopes or in none, as `Quota::reserve`.
-- KEYS: the reservation, then for each scope its sums and its running requests.
-- ARGV: id, tokens, money, lease in ms, time to the deadline in ms, then for each scope its six limits, -1 for none.
-- Returns {1} or {0, scope, kind, used, needed, retry in ms or -1 for never}, then for each scope the requests and tokens of the last
-- minute, the time until they are none, and the money of this day and this month.

local NAMES = { 'r', 't', 'd' }
local KINDS, CONCURRENT, SPEND_DAY, SPEND_MONTH, CONCURRENT_RETRY = 6, 4, 5, 6, 1000

local id, tokens, micros = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lease, lasts = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
-- It was cancelled before it came.
if redis.call('EXISTS', KEYS[1]) == 1 then return { 2 } end

local scopes, worst = {}, nil
for at = 1, (#KEYS - 1) / 2 do
  local scope, running = read(KEYS[2 * at], now), KEYS[2 * at + 1]
  scopes[at] = scope
  redis.call('ZREMRANGEBYSCORE', running, '-inf', whole(now))
  local used = { scope.R, scope.T, scope.D, redis.call('ZCARD', running), scope.cD, scope.cM }
  local needed, own = { 1, tokens, tokens, 1, micros, micros }, nil
  for kind = 1, KINDS do
    local limit = tonumber(ARGV[KINDS * (at - 1) + 5 + kind])
    local over = used[kind] + needed[kind] - limit
    if limit >= 0 and over > 0 and (kind < SPEND_DAY or micros > 0) then
      local retry = CONCURRENT_RETRY
      if needed[kind] > limit then
        retry = math.huge
      elseif kind == SPEND_DAY then
        retry = (scope.cd + 1) * CALENDAR_DAY - now
      elseif kind == SPEND_MONTH then
        retry = month_begins(scope.cm + 1) - now
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
  local minute, quarter, day, month = math.floor(now / MINUTE), math.floor(now / DAY), 0, 0
  for _, scope in ipairs(scopes) do
    minute, quarter = math.max(minute, scope.minute), math.max(quarter, scope.day)
    day, month = math.max(day, scope.cd), math.max(month, scope.cm)
  end
  for at, scope in ipairs(scopes) do
    add(scope, minute, quarter, tokens)
    -- A scope whose clock is behind goes on with the others.
    if scope.cd < day then scope.cd, scope.cD = day, 0 end
    if scope.cm < month then scope.cm, scope.cM = month, 0 end
    spend(scope, day, month, micros)
    keep(scope, now)
    run(KEYS[2 * at + 1], id, now + lease, now)
  end
  note(KEYS[1], lasts, minute, quarter, tokens, day, month, micros)
end
for _, scope in ipairs(scopes) do
  answer[#answer + 1] = scope.R
  answer[#answer + 1] = scope.T
  answer[#answer + 1] = until_empty(scope, now)
  answer[#answer + 1] = scope.cD
  answer[#answer + 1] = scope.cM
end
return answer
