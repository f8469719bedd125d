-- A gateway asks for a role, or keeps it, and leaves its state there.
-- KEYS: the holder, the state. ARGV: holder, milliseconds of the role, state or '', seconds that a state is kept.
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  if ARGV[3] ~= '' then redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4]) end
  holder = ARGV[1]
end
return {holder, redis.call('GET', KEYS[2]) or ''}
