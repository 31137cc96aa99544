// Asks a model with fetch, as Node, Deno and browsers have it: once, then by a stream, a record behind the answer to the
// last. The model adds two numbers: x FP32[1,2] to y FP32[1,1].
//
//     node ask.mjs http://127.0.0.1:8080/v2/models/m
const [model] = process.argv.slice(2);
const request = (id, x) => ({ id, inputs: [{ name: 'x', datatype: 'FP32', shape: [1, 2], data: x }] });

const answer = await fetch(`${model}/infer`, {
  method: 'POST',
  headers: { 'Content-Type': 'application/json', 'Request-Timeout-Ms': '1000' },
  body: JSON.stringify(request('one', [1, -2])),
  signal: AbortSignal.timeout(2000),
});
const result = await answer.json();
if (!answer.ok) throw new Error(`${answer.status} ${result.error}`);
console.log(result.id, result.outputs[0].data[0]);

let records;
const body = new ReadableStream({ start: (controller) => { records = controller; } });
const send = (id, x) => records.enqueue(new TextEncoder().encode(`${JSON.stringify(request(id, x))}\n`));
send('0', [0, 1]);
const stream = await fetch(`${model}/stream`, {
  method: 'POST', headers: { 'Content-Type': 'application/x-ndjson' }, body, duplex: 'half',
});
let text = '', turn = 0;
for await (const piece of stream.body.pipeThrough(new TextDecoderStream())) {
  const lines = (text + piece).split('\n');
  text = lines.pop();
  for (const line of lines.filter((each) => each)) { // empty lines are heartbeats
    const record = JSON.parse(line);
    console.log(record.id, record.type === 'result' ? record.outputs[0].data[0] : record.error);
    if (++turn < 5) send(String(turn), [turn, 1]);
    else if (turn === 5) records.close();
  }
}
