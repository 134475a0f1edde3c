//! Pipeline stages (`--pipeline`), end to end: answers are the same in any number of stages, with prefill in one number and decode in another,
//! cold and cached, and when a process that holds some of a worker's layers crashes in the middle of a stream. Strangers at a stage's port end
//! nothing but their own connections.

use crate::support::{Answer, Case, Cluster, DISAGGREGATED, assert_same, complete, complete_all, crash, mixed_cases, reference, reusable};
use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};
use tidemill_net::{
    identity::{Identity, issue},
    link::Endpoint,
};
use tidemill_proto::{
    block::{KvDtype, KvShape, LayoutFingerprint},
    frame::Preamble,
    stage::{FromStage, Hello, ToStage},
};
use tokio::{io::AsyncWriteExt, time::timeout};

/// A process of this cluster, by the name that it was started with.
fn process(cluster: &Cluster, name: &str) -> Option<(u32, Vec<String>)> {
    let pids = fs::read_dir("/proc").expect("/proc").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().find_map(|pid| {
        let parent = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let is_ours = parent.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()? == cluster.up_pid();
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let args: Vec<String> = command.split('\0').map(str::to_owned).collect();
        (is_ours && value(&args, "--name").as_deref() == Some(name)).then_some((pid, args))
    })
}

fn value(args: &[String], flag: &str) -> Option<String> {
    args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1)).cloned()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_the_same_in_any_number_of_stages() {
    let cases = mixed_cases(45);
    let reference = reference(&cases).await;
    let ranks = ["--tensor-parallel", "prefill=2,decode=1"];
    for (stages, more) in [("2", &[][..]), ("prefill=3,decode=2", &ranks), ("prefill=1,decode=3", &[]), ("prefill=2,decode=1", &[])] {
        let flags = ["--threads", "2", "--pipeline", stages, "--kv-memory", "1MiB"];
        let cluster = Cluster::start(&[DISAGGREGATED, &flags, more].concat());
        let cold = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &cold, &cases, &format!("{stages}, cold"));
        for (answer, case) in cold.iter().zip(&cases) {
            assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        }
        let warm = complete_all(&cluster, &cases, 4).await;
        assert_same(&reference, &warm, &cases, &format!("{stages}, cached, 4 at a time"));
        assert!(warm.iter().zip(&cases).all(|(answer, case)| answer.cached() == reusable(case)), "nothing is computed twice");
        cluster.stop();
    }
}

/// A long answer, so that there is time to crash what computes it.
fn long_case() -> Case {
    Case { prompt: (0..400).map(|i| 3 + (i * 7 + i / 5) % 500).collect(), seed: Some(11), max_tokens: 1200 }
}

/// Waits until a decode worker is at work on a request, and returns its name.
async fn busy_decode(cluster: &Cluster) -> String {
    loop {
        let now = cluster.cluster().await;
        let members = now["members"].as_array().expect("members");
        if let Some(busy) = members.iter().find(|m| m["role"] == "decode" && m["assigned"].as_u64() > Some(0)) {
            return busy["name"].as_str().expect("a name").to_owned();
        }
    }
}

/// The time from a worker's being assigned into a long answer, which takes 300 ms in all on a fast machine. A slow one is still at the prompt.
const MIDDLE: Duration = Duration::from_millis(100);

/// Answers a long case while the last stage of the worker at work is crashed. Returns the answer, and that worker's name and process id.
async fn answer_with_crash(cluster: &Cluster, case: &Case) -> (Answer, (String, u32)) {
    let crashing = async {
        let name = timeout(Duration::from_secs(60), busy_decode(cluster)).await.expect("a decode worker at work");
        let worker = cluster.pid(&name).await;
        let (stage, _) = process(cluster, &format!("{name}-stage-2")).expect("a second stage");
        tokio::time::sleep(MIDDLE).await;
        crash(stage);
        (name, worker)
    };
    tokio::join!(complete(cluster, case), crashing)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_a_stage_does_not_show_in_the_answer() {
    let case = long_case();
    let reference = reference(std::slice::from_ref(&case)).await;
    let cluster = Cluster::start(&[DISAGGREGATED, &["--decode", "2", "--pipeline", "2", "--threads", "1"]].concat());
    let (answer, (name, worker)) = answer_with_crash(&cluster, &case).await;
    assert_eq!(answer.tokens, reference[0].tokens);
    assert_ne!(answer.usage["tidemill"]["decode_worker"], name, "another worker ended it: {}", answer.usage);
    cluster.gone(worker).await;
    let again = complete(&cluster, &case).await;
    assert_eq!(again.tokens, reference[0].tokens, "the other worker serves");
    // A process crashed, so `stop` does not apply.
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_stage_and_its_head_are_started_again() {
    let case = long_case();
    let reference = reference(std::slice::from_ref(&case)).await;
    let cluster = Cluster::start(&[DISAGGREGATED, &["--pipeline", "decode=2", "--threads", "1", "--restarts", "5"]].concat());
    // There is no other decode worker: the sequence waits for this one to come back.
    let (answer, (_, worker)) = answer_with_crash(&cluster, &case).await;
    assert_eq!(answer.tokens, reference[0].tokens);
    cluster.gone(worker).await;
    assert_eq!(complete(&cluster, &case).await.tokens, reference[0].tokens, "what was started again serves");
    cluster.stop();
}

/// Connects to a stage with a certificate of the cluster, opens a stream of this kind and sends `message`. Returns the answer, or the reason of
/// the end.
async fn knock(endpoint: &Endpoint, addr: SocketAddr, kind: Preamble, message: &ToStage) -> Result<Option<FromStage>, String> {
    let knocking = async {
        let connection = endpoint.connect(addr).await?;
        let (mut sender, mut receiver) = connection.open::<ToStage, FromStage>(kind).await?;
        sender.send(message).await?;
        receiver.recv().await
    };
    timeout(Duration::from_secs(10), knocking).await.expect("an end within the deadline").map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_at_a_stages_port_end_nothing_but_their_own_connections() {
    let data = tempfile::tempdir().unwrap();
    let data_flags = ["--data", data.path().to_str().unwrap()];
    let cluster = Cluster::start(&[&["--pipeline", "decode=2", "--prefill", "0", "--threads", "1"][..], &data_flags].concat());
    let (pid, args) = process(&cluster, "decode-0-stage-2").expect("a second stage");
    let addr: SocketAddr = value(&args, "--bind").expect("an address").parse().unwrap();
    let case = Case { max_tokens: 24, ..long_case() };
    let expected = complete(&cluster, &case).await;
    let local = SocketAddr::from(([127, 0, 0, 1], 0));

    // Noise, to both kinds of sockets.
    let udp = std::net::UdpSocket::bind(local).unwrap();
    for bytes in [&[0; 1200][..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64]] {
        udp.send_to(bytes, addr).unwrap();
    }
    let mut tcp = tokio::net::TcpStream::connect(addr).await.unwrap();
    let _ = tcp.write_all(&[7; 4096]).await;

    // A certificate of the cluster, of another role.
    let named = |name: &str| -> Endpoint {
        let (dir, _): (PathBuf, _) = issue::issue(&data.path().join("pki"), name, issue::DAYS).unwrap();
        Endpoint::bind_client(local, &Identity::load(&dir).unwrap()).unwrap()
    };
    let shape = KvShape { layers: 3, kv_heads: 2, head_dim: 16, dtype: KvDtype::F32, latent: None };
    let hello = |stage: &str| Hello { stage: stage.parse().unwrap(), layout: LayoutFingerprint([7; 16]), shape };
    let reason = knock(&named("kvpool/kvpool-9"), addr, Preamble::Stage, &ToStage::Hello(hello("2/2"))).await.unwrap_err();
    assert!(reason.contains("not decode"), "{reason}");

    // A decode worker's certificate, but another kind of stream, no greeting, and another model.
    let decode = named("decode/decode-9");
    let reason = knock(&decode, addr, Preamble::Pool, &ToStage::Hello(hello("2/2"))).await.unwrap_err();
    assert!(reason.contains("not a Tidemill process of the expected kind"), "{reason}");
    let reason = knock(&decode, addr, Preamble::Stage, &ToStage::Begin { blocks: u32::MAX }).await.unwrap_err();
    assert!(reason.contains("begins with its greeting"), "{reason}");
    for (stage, words) in [("2/3", "stage 2 of 2, and the head wants stage 2 of 3"), ("2/2", "one `kv_dtype`")] {
        let answer = knock(&decode, addr, Preamble::Stage, &ToStage::Hello(hello(stage))).await.unwrap();
        assert!(matches!(&answer, Some(FromStage::Refused { reason }) if reason.contains(words)), "{answer:?}");
    }
    // A connection that sends nothing does not delay the others.
    let _silent = decode.connect(addr).await.unwrap();

    let after = complete(&cluster, &case).await;
    assert_eq!(after.tokens, expected.tokens);
    assert_eq!(process(&cluster, "decode-0-stage-2").expect("it is there").0, pid, "the same process");
    assert_eq!(after.usage["tidemill"]["rescues"], expected.usage["tidemill"]["rescues"], "its head has not lost it");
    cluster.stop();
}
