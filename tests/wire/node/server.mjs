// Serves with Node's http2 on a port of its own, which it prints: /echo answers with the request's body and trailers.
// After "leave" on its input it sends GOAWAY, lets streams end, and exits.
import http2 from "node:http2"

const sessions = new Set()
const server = http2.createServer({ settings: { maxConcurrentStreams: 7, initialWindowSize: 3000 } })
server.on("session", (session) => {
  sessions.add(session)
  session.on("close", () => sessions.delete(session))
})
server.on("stream", (stream) => {
  stream.on("error", () => {})
  const pieces = []
  stream.on("data", (piece) => pieces.push(piece))
  stream.on("end", () => {
    stream.respond({ ":status": 200, "content-type": "text/plain" }, { waitForTrailers: true })
    stream.on("wantTrailers", () => stream.sendTrailers({ "grpc-status": "0" }))
    stream.end(Buffer.concat(pieces))
  })
})
server.listen(0, "127.0.0.1", () => console.log(server.address().port))
process.stdin.on("data", () => {
  for (const session of sessions) session.close()
  server.close()
})
process.stdin.on("end", () => process.exit())
