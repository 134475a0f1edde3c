-- Charges a request that a coordinator let pass by itself, whatever the limits.
-- KEYS: as for a reservation. ARGV: id, tokens, lease in ms, time to the deadline in ms, age in ms.

local id, tokens, lease, keep, age = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local minute, day = math.floor((now - age) / MINUTE), math.floor((now - age) / DAY)
for at = 1, (#KEYS - 1) / 2 do
  add(read(KEYS[2 * at], now), minute, day, tokens)
  run(KEYS[2 * at + 1], id, now + lease, now)
end
note(KEYS[1], minute, day, tokens, keep)
return 1
