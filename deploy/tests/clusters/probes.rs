//! Probes find an engine with one flipped bit, in a cluster of real processes.
//!
//! An embedding table is used where its file is mapped. So changing a bit in the file of a running worker changes that worker's memory,
//! and no identity check notices: the digest of the weights was taken when they were loaded.

use crate::support::{
    Answer, Case, Cluster, DISAGGREGATED, MODEL, assert_same, complete, complete_all, member, mixed_cases, reference, reusable,
};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};
use tempfile::TempDir;

/// The token whose row of the embedding gets a wrong bit.
const TOKEN: u32 = 2;

/// An additional worker of a running cluster, with its own copy of the checkpoint.
struct Worker {
    child: Child,
    model: TempDir,
}

impl Worker {
    /// Starts a worker with the flags of the cluster's worker `like`, and waits until it answers probes.
    async fn join(cluster: &Cluster, data: &Path, role: &str, like: &str) -> Self {
        let model = tempfile::tempdir().expect("a directory");
        for file in fs::read_dir(MODEL).expect("the fixture") {
            let file = file.expect("an entry").path();
            fs::copy(&file, model.path().join(file.file_name().expect("a name"))).expect("a copy");
        }
        let mut certs = Command::new(env!("CARGO_BIN_EXE_tidemill"));
        let certified = certs.arg("certs").arg(data.join("pki")).arg(format!("{role}/{role}-9")).output().expect("tidemill runs");
        assert!(certified.status.success(), "{certified:?}");
        let pki = PathBuf::from(String::from_utf8(certified.stdout).expect("text").split('\t').next().expect("a directory"));
        let line = fs::read(format!("/proc/{}/cmdline", cluster.pid(like).await)).expect("its command line");
        let mut args: Vec<String> = line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        args.pop();
        let name = format!("{role}-9");
        let instead = [("--name", name.clone()), ("--pki", pki.display().to_string()), ("--model", model.path().display().to_string())];
        for (flag, value) in instead {
            let place = args.iter().position(|arg| arg == flag).unwrap_or_else(|| panic!("no {flag} in {args:?}"));
            args[place + 1] = value;
        }
        let child = Command::new(&args[0]).args(&args[1..]).stdin(Stdio::piped()).spawn().expect("the worker starts");
        cluster.until("one more worker that answers probes", |c| probed(c, &name) == Some("same".into())).await;
        Self { child, model }
    }

    /// Flips one bit of one weight: the highest bit of the mantissa, in the embedding of a token that probes use.
    fn flip(&self) {
        const ROW_BYTES: u64 = 64 * 2;
        let file = fs::File::options().read(true).write(true).open(self.model.path().join("model.safetensors")).expect("the copy");
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).expect("the header's length");
        let length = u64::from_le_bytes(length);
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).expect("the header");
        let header: Value = serde_json::from_slice(&header).expect("JSON");
        let start = header["model.embed_tokens.weight"]["data_offsets"][0].as_u64().expect("an offset");
        let at = 8 + length + start + u64::from(TOKEN) * ROW_BYTES;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a weight");
        file.write_all_at(&[byte[0] ^ 1 << 6], at).expect("a weight");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn probed(cluster: &Value, name: &str) -> Option<String> {
    let members = cluster["members"].as_array().expect("members");
    members.iter().find(|member| member["name"] == name)?["probe"]["outcome"].as_str().map(str::to_owned)
}

fn rounds(cluster: &Value) -> u64 {
    cluster["models"][0]["probes"]["rounds"].as_u64().expect("rounds")
}

/// Flips the worker's bit right after a round, does something `meanwhile`, and waits until the worker is found.
async fn found<T>(cluster: &Cluster, name: &str, worker: &Worker, meanwhile: impl Future<Output = T>) -> T {
    let earlier = rounds(&cluster.cluster().await);
    cluster.until("the end of a round", |c| rounds(c) > earlier).await;
    let before = rounds(&cluster.cluster().await);
    let flipped = Instant::now();
    worker.flip();
    let done = meanwhile.await;
    cluster.until("the worker being found", |c| member(c, name)["unhealthy"] == true).await;
    println!("{name}: found {:.1} s after the bit had flipped", flipped.elapsed().as_secs_f64());
    let view = cluster.cluster().await;
    assert!(rounds(&view) <= before + 2, "the round that ran, and the next one: {before}, then {}", rounds(&view));
    let unhealthy = view["members"].as_array().expect("members").iter().filter(|member| member["unhealthy"] == true);
    assert!(unhealthy.clone().all(|member| member["name"].as_str().is_some_and(|name| name.ends_with("-9"))), "nobody else: {view:#}");
    done
}

/// Prompts that start with the token whose embedding is wrong.
fn wrong_for_a_bad_worker() -> Vec<Case> {
    let case = |n: u32| Case {
        prompt: (0..80).map(|place| if place == 0 { TOKEN } else { 3 + n * 97 % 400 + place }).collect(),
        seed: None,
        max_tokens: 16,
    };
    (0..40).map(case).collect()
}

/// The first of the cases that this prefill worker computes, with its answer, or `None` if the worker was found before.
async fn computed_by<'a>(cluster: &Cluster, name: &str, cases: &'a [Case]) -> Option<(&'a Case, Answer)> {
    for case in cases {
        let answer = complete(cluster, case).await;
        if answer.usage["tidemill"]["prefill_worker"] == name {
            return Some((case, answer));
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn one_flipped_bit_of_a_running_worker_is_found_within_a_period() {
    let cases = mixed_cases(11);
    let expected = reference(&cases).await;
    let data = tempfile::tempdir().expect("a directory");
    let dir = data.path().display().to_string();
    let flags = [DISAGGREGATED, &["--data", &dir, "--decode", "2", "--probe-every-s", "3", "--threads", "1"]].concat();
    let cluster = Cluster::start(&flags);

    let decode = Worker::join(&cluster, data.path(), "decode", "decode-0").await;
    let prefill = Worker::join(&cluster, data.path(), "prefill", "prefill-0").await;
    assert_same(&expected, &complete_all(&cluster, &cases, 3).await, &cases, "before");

    found(&cluster, "decode-9", &decode, async {}).await;
    let wrong = wrong_for_a_bad_worker();
    // Its blocks are in the pool, under the keys that all workers ask for. Once the worker is found, they are no longer read.
    if let Some((case, before)) = found(&cluster, "prefill-9", &prefill, computed_by(&cluster, "prefill-9", &wrong)).await {
        let right = &reference(std::slice::from_ref(case)).await[0];
        let [first, second] = [complete(&cluster, case).await, complete(&cluster, case).await];
        println!("the bad worker's blocks gave {:?} instead of {:?}", before.tokens, right.tokens);
        assert_eq!((&first.tokens, &second.tokens), (&right.tokens, &right.tokens));
        assert_eq!((first.cached(), second.cached()), (0, reusable(case)), "new blocks, and these are read");
    }
    let answers = complete_all(&cluster, &mixed_cases(12), 3).await;
    for answer in &answers {
        let by = |role: &str| answer.usage["tidemill"][format!("{role}_worker")].as_str().map(str::to_owned);
        assert!(by("decode").is_some_and(|name| name != "decode-9") && by("prefill") != Some("prefill-9".into()), "{}", answer.usage);
    }
    for name in ["decode-9", "prefill-9"] {
        assert_eq!(cluster.metric("tidemill_probe_unhealthy", &[format!("worker=\"{name}\"")]).await, 1.0);
    }
    assert_eq!(cluster.metric("tidemill_probe_unhealthy", &[]).await, 2.0);
    assert_eq!(cluster.metric("tidemill_probe_answers_total", &["differs".into()]).await, 2.0);
    assert!(cluster.metric("tidemill_probe_answers_total", &["same".into()]).await > 5.0);
    // Ends the bad workers, and waits until the cluster has removed them.
    drop((decode, prefill));
    cluster.until("the bad workers being gone", |c| c["members"].as_array().expect("members").len() == 4).await;
    cluster.stop();
}
