-- Charges a request that a coordinator let pass by itself, whatever the limits.
-- KEYS: as for a reservation. ARGV: id, tokens, money, lease in ms, time to the deadline in ms, age in ms.

local id, tokens, micros = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lease, lasts, age = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_ms()
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local minute, quarter = math.floor((now - age) / MINUTE), math.floor((now - age) / DAY)
local day = math.floor((now - age) / CALENDAR_DAY)
local month = month_of(day)
for at = 1, (#KEYS - 1) / 2 do
  local scope = read(KEYS[2 * at], now)
  add(scope, minute, quarter, tokens)
  spend(scope, day, month, micros)
  keep(scope, now)
  run(KEYS[2 * at + 1], id, now + lease, now)
end
note(KEYS[1], lasts, minute, quarter, tokens, day, month, micros)
return 1
