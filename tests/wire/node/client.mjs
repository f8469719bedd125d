// Calls the server at argv[2] with Node's http2: many at once, a large body, a reset, a ping; then leaves with GOAWAY.
import assert from "node:assert"
import http2 from "node:http2"
import { once } from "node:events"

const session = http2.connect(process.argv[2])
session.on("error", (error) => { throw error })

async function call(path, body, before = {}) {
  const stream = session.request({ ":method": "POST", ":path": path, ...before })
  let trailers
  stream.on("trailers", (fields) => { trailers = fields })
  stream.end(body)
  const [head] = await once(stream, "response")
  const pieces = []
  for await (const piece of stream) pieces.push(piece)
  return { status: head[":status"], body: Buffer.concat(pieces), trailers }
}

const small = await call("/echo", "hello")
assert.equal(small.status, 200)
assert.equal(small.body.toString(), "hello")
assert.equal(small.trailers["grpc-status"], "0")

const many = await Promise.all([...Array(300).keys()].map((number) => call("/echo", `body ${number}`)))
many.forEach((answer, number) => assert.equal(answer.body.toString(), `body ${number}`))

const large = Buffer.alloc(1 << 20, "0123456789abcdef")
assert.ok((await call("/echo", large)).body.equals(large))

const wide = await call("/echo", "x", { "x-wide": "v".repeat(20_000) })
assert.equal(wide.status, 431)

const left = session.request({ ":method": "POST", ":path": "/hold" })
left.write("a")
left.on("error", () => {})
await new Promise((done) => session.ping(() => done()))
left.close(http2.constants.NGHTTP2_CANCEL)

await new Promise((done, failed) => session.ping((error) => (error ? failed(error) : done())))
session.close()
await once(session, "close")
console.log("every answer was right")
