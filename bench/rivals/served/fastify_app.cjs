// The model as a service of one's own in Node has it: `node fastify_app.cjs NAME ONNX HTTP_PORT`.
//
// fastify 5 and onnxruntime-node on one thread; NODE_PATH is where they are. infer of the Open Inference Protocol, JSON
// and binary, for a model with one FP32 input `x` and one output `y`.
"use strict";

const fastify = require("fastify");
const ort = require("onnxruntime-node");

const [name, path, port] = process.argv.slice(2);

function inputOf(text, raw) {
  const request = JSON.parse(text);
  const x = request.inputs[0];
  // A copy: the raw tensor need not begin where a Float32Array may.
  const data = raw ? new Float32Array(Uint8Array.from(raw).buffer) : Float32Array.from(x.data);
  return new ort.Tensor("float32", data, x.shape);
}

async function main() {
  const options = { intraOpNumThreads: 1, interOpNumThreads: 1, executionProviders: ["cpu"] };
  const session = await ort.InferenceSession.create(path, options);
  const app = fastify({ bodyLimit: 64 << 20 });
  const whole = { parseAs: "buffer" };
  app.addContentTypeParser(["application/octet-stream", "application/json"], whole, (_, body, done) => done(null, body));
  app.get("/v2/health/ready", () => ({ ready: true }));
  app.post(`/v2/models/${name}/infer`, async (request, reply) => {
    const length = request.headers["inference-header-content-length"];
    const body = request.body;
    const end = length === undefined ? body.length : Number(length);
    const x = inputOf(body.toString("utf8", 0, end), length === undefined ? null : body.subarray(end));
    const { y } = await session.run({ x });
    const output = { name: "y", datatype: "FP32", shape: y.dims };
    if (length === undefined) {
      return { model_name: name, outputs: [{ ...output, data: Array.from(y.data) }] };
    }
    const raw = Buffer.from(y.data.buffer, y.data.byteOffset, y.data.byteLength);
    const parameters = { binary_data_size: raw.length };
    const head = Buffer.from(JSON.stringify({ model_name: name, outputs: [{ ...output, parameters }] }));
    reply.header("Inference-Header-Content-Length", head.length).type("application/octet-stream");
    return Buffer.concat([head, raw]);
  });
  await app.listen({ host: "127.0.0.1", port: Number(port) });
}

main();
