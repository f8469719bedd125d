// Calls the server at argv[2] with grpc-js: unary calls at once, a stream in both directions, a cancelled one.
const assert = require("node:assert")
const grpc = require("@grpc/grpc-js")

const same = (message) => message
const method = (path, stream) => ({
  path, requestStream: stream, responseStream: stream,
  requestSerialize: same, requestDeserialize: same, responseSerialize: same, responseDeserialize: same,
})
const Client = grpc.makeGenericClientConstructor({ Echo: method("/echo", false), Chat: method("/chat", true), Hold: method("/hold", false) })
const client = new Client(process.argv[2], grpc.credentials.createInsecure())

const echo = (message) => new Promise((done, failed) =>
  client.Echo(message, (error, answer) => (error ? failed(error) : done(answer))))

async function main() {
  const answers = await Promise.all([...Array(300).keys()].map((number) => echo(Buffer.from(`message ${number}`))))
  answers.forEach((answer, number) => assert.equal(answer.toString(), `message ${number}`))
  const large = Buffer.alloc(1 << 20, "0123456789abcdef")
  assert.ok((await echo(large)).equals(large))

  const chat = client.Chat()
  let count = 0
  chat.write(Buffer.from("0"))
  for await (const message of chat) {
    assert.equal(message.toString(), `${count}`)
    count += 1
    if (count < 10) chat.write(Buffer.from(`${count}`))
    else chat.end()
  }
  assert.equal(count, 10)

  const late = await new Promise((done) => client.Hold(Buffer.from("x"), { deadline: Date.now() + 300 }, (error) => done(error)))
  assert.equal(late.code, grpc.status.DEADLINE_EXCEEDED)
  assert.equal((await echo(Buffer.from("after"))).toString(), "after")
  client.close()
  console.log("every answer was right")
}
main().catch((error) => { console.error(error); process.exit(1) })
