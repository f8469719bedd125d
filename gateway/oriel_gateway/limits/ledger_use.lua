-- A gateway adds what tenants have used, once per number, and gets what the others have added since.
-- KEYS: the sums, the log of additions. ARGV: holder, number, place in the log or '' for the sums themselves, since
-- when it counts, seconds that sums are kept, then pairs of name and amount.
local sums, log, holder = KEYS[1], KEYS[2], ARGV[1]
redis.call('HSETNX', sums, 'since', ARGV[4])
if #ARGV > 5 and tonumber(ARGV[2]) > tonumber(redis.call('HGET', sums, '#' .. holder) or '0') then
  for i = 6, #ARGV, 2 do redis.call('HINCRBY', sums, ARGV[i], ARGV[i + 1]) end
  redis.call('HSET', sums, '#' .. holder, ARGV[2])
  redis.call('XADD', log, 'MAXLEN', '~', 20000, '*', '#', holder, unpack(ARGV, 6))
end
redis.call('EXPIRE', sums, ARGV[5])
redis.call('EXPIRE', log, ARGV[5])
local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
local place, found = last[1] and last[1][1] or '0-0', {}
if ARGV[3] == '' then return {place, redis.call('HGETALL', sums)} end
for _, entry in ipairs(redis.call('XRANGE', log, '(' .. ARGV[3], '+', 'COUNT', 1000)) do
  place = entry[1]
  if entry[2][2] ~= holder then
    for i = 3, #entry[2] do found[#found + 1] = entry[2][i] end
  end
end
return {place, found}
