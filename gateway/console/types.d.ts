// The shapes that the front door sends (`/v1`, `/cluster`, `/cluster/events`) and those that the browser keeps. For `tsc` only: not served.

export type Role = "prefill" | "decode" | "kvpool";

export interface Blocks {
  total: number;
  free: number;
  cached: number;
  used: number;
  bytes_per_block: number;
}

export interface Moved {
  bytes: number;
  transfers: number;
  seconds: number;
}

export interface TokensBySource {
  hbm: number;
  dram: number;
  nvme: number;
  object: number;
  remote: number;
  prefill: number;
  local: number;
}

/** Monotone since the member's process started. */
export interface Counters {
  tokens: TokensBySource;
  prefill_computed_tokens: number;
  prefill_cached_tokens: number;
  tokens_generated: number;
  /** By their place in the draft. */
  tokens_drafted: number[];
  tokens_accepted: number[];
  preemptions: number;
  steps: number;
  transfer: { shm_put: Moved; shm_get: Moved; quic_put: Moved; quic_get: Moved };
  misses: { absent: number; stale: number; corrupt: number; unreachable: number };
  disk: { stored: Moved; loaded: Moved; corrupt: number; errors: number; given_up: number };
}

export interface Member {
  name: string;
  host: string;
  role: Role;
  pid: number;
  epoch: string;
  draining: boolean;
  unhealthy: boolean;
  seconds_since_heartbeat: number;
  assigned: number;
  report: {
    waiting: number;
    running: number;
    tokens_queued: number;
    blocks: { hbm: Blocks; dram: Blocks; nvme: Blocks; object: Blocks };
    counters: Counters;
  };
  indexed_blocks: number;
  addr?: string;
}

export interface ClusterView {
  members: Member[];
  layout: string | null;
  context_tokens: number | null;
  requests: number;
  sequences_waiting: number;
  sequences_running: number;
  rescues: number;
}

/** `usage.tidemill`: where a prompt's KV came from, and where the time went. */
export interface Path {
  tokens: TokensBySource;
  queue_ms: number;
  fetch_ms: number;
  prefill_ms: number;
  transfer_ms: number;
  tail_ms: number;
  decode_ms: number;
  decode_worker: string;
  prefill_worker: string | null;
  preemptions: number;
  rescues: number;
  tokens_drafted: number;
  tokens_accepted: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
  tidemill: Path | null;
}

export interface Chunk {
  choices: { index: number; delta: { role?: string; content?: string }; finish_reason: string | null }[];
  usage?: Usage | null;
  error?: { message: string };
}

/** A choice that ended, as the front door measured it. */
export interface FinishedRequest {
  /** How long ago it ended when this was sent: clocks of two machines differ. */
  age_ms: number;
  prompt_tokens: number;
  completion_tokens: number;
  ttft_ms: number;
  /** `null` where there was one token. */
  tpot_ms: number | null;
  /** What the scheduler expected; `null` where the request had no place. */
  ttft_predicted_ms: number | null;
  path: Path;
}

/** What the cluster is like at one moment. */
export interface Snapshot {
  cluster: ClusterView;
  /** Share of finished choices that met the objectives; `null` before the first. */
  goodput: number | null;
}

/** Means over what finished between two looks at `/metrics`: all that polling can tell of TTFT and TPOT. */
export interface Latencies {
  ttft_ms: number | null;
  tpot_ms: number | null;
}

/** Where the live data comes from. `absent`: this port does not serve it; `closed`: only to operators who have signed in. */
export type FeedState = "connecting" | "live" | "polling" | "lost" | "closed" | "absent";

/** What `/console/who` says. `until`: the end of the session, in Unix seconds. */
export interface Account {
  operator: { shown: string; subject: string; role: string | null; until: number | null } | null;
  sign_in: boolean;
}

/** Money has up to six decimals, as text. */
export interface SpendOf {
  spent: string;
  spent_micros: number;
  soft: string | null;
  hard: string | null;
}

export interface SpendRow {
  tenant: string;
  day: SpendOf;
  month: SpendOf;
}

/** What `/admin/spend` says. */
export interface Spend {
  tenants: SpendRow[];
}

/** An empty value leaves the choice to the model or the server. */
export interface Sampling {
  temperature: number | null;
  top_p: number | null;
  max_tokens: number | null;
  seed: number | null;
}

/** What the browser measured of an answer, and what the cluster said about it. */
export interface Receipt {
  ttft_ms: number;
  /** From the first token to the last one. */
  stream_ms: number;
  chunks: number;
  usage: Usage | null;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
  receipt?: Receipt;
  /** How an answer ended that is not whole. */
  ended?: "stopped" | "length" | "failed";
  error?: string;
}

export interface Conversation {
  id: string;
  title: string;
  /** Given by the user, not taken from the first message. */
  named: boolean;
  updated_unix_ms: number;
  system: string;
  sampling: Sampling;
  messages: Message[];
}
