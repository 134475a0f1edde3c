//! Against librdkafka's brokers in this process, and against a real one that is killed.

use super::*;
use crate::{
    journal::{self, Journal},
    sink::{Journaled, Sink},
    usage::Event,
    web::tests::wait_until,
};
use rdkafka::{
    Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::{BorrowedMessage, Headers},
    mocking::MockCluster,
    types::{RDKafkaApiKey, RDKafkaRespErr},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::SystemTime,
};

const TOPIC: &str = "tidemill.usage";
const PARTITIONS: i32 = 3;
const TENANTS: usize = 5;

fn settings(brokers: &str) -> Settings {
    Settings { brokers: vec![brokers.to_owned()], encryption: Encryption::Plain, login: None, source: "c0".into() }
}

fn kafka(brokers: &str) -> Kafka {
    Kafka { arrives_within: Duration::from_secs(4), ..Kafka::new(settings(brokers), TOPIC.into()) }
}

fn message(number: usize) -> Message {
    Message { id: format!("req_{number}"), tenant: format!("tenant_{}", number % TENANTS), json: format!(r#"{{"number":{number}}}"#) }
}

fn log(dir: &Path) -> Journal<Event> {
    let settings = journal::Settings { sync_every: Duration::from_millis(20), segment_bytes: 4000 };
    Journal::open(dir, settings, SystemTime::UNIX_EPOCH, drop).unwrap()
}

async fn write(log: &Journal<Event>, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let Message { id, tenant, .. } = message(number);
        log.write(Event { id, tenant, ..Event::default() }).await;
    }
}

fn sink(dir: &Path, brokers: &str) -> Sink {
    Sink::start("usage", dir.join("kafka.json"), Journaled::<Event>::new(dir, "c0"), kafka(brokers)).unwrap()
}

/// A message as a consumer sees it: its partition, its key, and its id.
fn seen(message: &BorrowedMessage<'_>) -> (i32, String, String) {
    let header = |name: &str| {
        let found = message.headers().unwrap().iter().find(|header| header.key == name);
        String::from_utf8(found.unwrap().value.unwrap().to_vec()).unwrap()
    };
    assert_eq!(header("source"), "c0");
    (message.partition(), String::from_utf8(message.key().unwrap_or_default().to_vec()).unwrap(), header("id"))
}

/// Reads a topic from its beginning until nothing has come for a while. Returns the ids of each tenant, in order, and checks that a tenant
/// has one partition.
fn all_of(brokers: &str) -> BTreeMap<String, Vec<String>> {
    let consumer: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers).set("group.id", "test").create().unwrap();
    let mut assigned = TopicPartitionList::new();
    (0..PARTITIONS).for_each(|partition| assigned.add_partition_offset(TOPIC, partition, Offset::Beginning).unwrap());
    consumer.assign(&assigned).unwrap();
    let (mut found, mut partitions) = (BTreeMap::<String, Vec<String>>::new(), BTreeMap::new());
    let mut waits = 0;
    while waits < 4 {
        match consumer.poll(Duration::from_secs(1)) {
            Some(Ok(message)) => {
                let (partition, tenant, id) = seen(&message);
                assert_eq!(*partitions.entry(tenant.clone()).or_insert(partition), partition, "{tenant} has one partition");
                found.entry(tenant).or_default().push(id);
                waits = 0;
            }
            Some(Err(_)) | None => waits += 1,
        }
    }
    found
}

/// Checks that every event has arrived, and that each tenant's came in order, but for repeats of a run of them. Returns the number of
/// repeats.
fn check(found: &BTreeMap<String, Vec<String>>, numbers: usize) -> usize {
    let mut repeats = 0;
    for (tenant, ids) in found {
        let mut firsts = BTreeSet::new();
        let order: Vec<_> = ids.iter().filter(|id| firsts.insert((*id).clone())).cloned().collect();
        let expected: Vec<_> = (0..numbers).map(message).filter(|message| message.tenant == *tenant).map(|message| message.id).collect();
        assert_eq!(order, expected, "{tenant}");
        repeats += ids.len() - order.len();
    }
    assert_eq!(found.len(), TENANTS);
    repeats
}

fn cluster() -> (MockCluster<'static, rdkafka::producer::DefaultProducerContext>, String) {
    let cluster = MockCluster::new(3).unwrap();
    cluster.create_topic(TOPIC, PARTITIONS, 3).unwrap();
    let brokers = cluster.bootstrap_servers();
    (cluster, brokers)
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_arrives_while_brokers_die_and_answers_are_lost() {
    let (cluster, brokers) = cluster();
    let dir = tempfile::tempdir().unwrap();
    let log = log(dir.path());
    write(&log, 0..50).await;
    let sink = sink(dir.path(), &brokers);
    wait_until(|| sink.counts().events == 50);
    use RDKafkaRespErr::{RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION as NOT_LEADER, RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT as TIMED_OUT};
    cluster.request_errors(RDKafkaApiKey::Produce, &[TIMED_OUT, NOT_LEADER, TIMED_OUT]);
    write(&log, 50..100).await;
    wait_until(|| sink.counts().events == 100);
    for broker in 1..=3 {
        cluster.broker_down(broker).unwrap();
        write(&log, 50 + 50 * broker as usize..100 + 50 * broker as usize).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        cluster.broker_up(broker).unwrap();
        wait_until(|| sink.counts().behind == 0 && sink.counts().events >= 100 + 50 * broker as u64);
    }
    assert!(!sink.counts().is_failing);
    check(&all_of(&brokers), 250);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_wait_in_the_log_while_no_broker_is_there_and_arrive_after_a_restart() {
    let (cluster, brokers) = cluster();
    (1..=3).for_each(|broker| cluster.broker_down(broker).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let log = log(dir.path());
    write(&log, 0..20).await;
    let before = sink(dir.path(), &brokers);
    wait_until(|| before.counts().is_failing);
    assert_eq!((before.counts().events, before.counts().behind), (0, 20));
    drop(before);
    (1..=3).for_each(|broker| cluster.broker_up(broker).unwrap());
    let after = sink(dir.path(), &brokers);
    write(&log, 20..40).await;
    wait_until(|| after.counts().behind == 0 && after.counts().events >= 40);
    check(&all_of(&brokers), 40);
    drop(after);
    let again = sink(dir.path(), &brokers);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((again.counts().events, again.counts().behind), (0, 0), "what has arrived is not sent again");
}

#[test]
fn an_error_says_what_failed_and_where() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = kafka(&free.to_string()).send(&[message(1)]).unwrap_err();
    // No broker listens there any more.
    assert!(error.contains(TOPIC) && error.contains(&free.port().to_string()), "{error}");
    let (cluster, brokers) = cluster();
    let denied = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    cluster.request_errors(RDKafkaApiKey::Produce, &[denied; 9]);
    let error = kafka(&brokers).send(&[message(1), message(2)]).unwrap_err();
    assert!(error.contains(TOPIC) && error.contains("authorization failed"), "{error}");
    let with = |change: &dyn Fn(&mut Settings)| {
        let mut kafka = kafka(&brokers);
        change(&mut kafka.settings);
        kafka.send(&[message(1)]).unwrap_err()
    };
    let error = with(&|settings| settings.encryption = Encryption::Tls { ca: Some("/not/there.pem".into()), client: None });
    assert!(error.contains("/not/there.pem"), "{error}");
    let login = Login { mechanism: super::super::Mechanism::ScramSha512, user: "me".into(), password: "/not/there".into() };
    let error = with(&|settings| settings.login = Some(login.clone()));
    assert!(error.contains("/not/there"), "{error}");
}

/// A broker of its own process (`tansu`), whose storage outlives it.
struct Broker {
    program: PathBuf,
    port: u16,
    process: Child,
}

impl Broker {
    fn start(program: &Path, port: u16) -> Self {
        let url = format!("tcp://127.0.0.1:{port}");
        let storage = std::env::var("TANSU_STORAGE").expect("TANSU_STORAGE is where the broker keeps what it was sent");
        let process = Command::new(program)
            .args(["broker", "--listener-url", &url, "--advertised-listener-url", &url, "--storage-engine", &storage])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { program: program.to_owned(), port, process }
    }

    /// Kills the broker (SIGKILL), and starts it again after a while.
    fn restart(mut self) -> Self {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        std::thread::sleep(Duration::from_secs(1));
        Self::start(&self.program.clone(), self.port)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a broker: TANSU is the program, TANSU_STORAGE a store that outlives it, with the topic `tidemill.usage` of three partitions"]
async fn nothing_is_lost_when_a_real_broker_is_killed_and_comes_back() {
    let program = PathBuf::from(std::env::var("TANSU").unwrap());
    let port = std::env::var("TANSU_PORT").map_or(9092, |port| port.parse().unwrap());
    let brokers = format!("127.0.0.1:{port}");
    let mut broker = Broker::start(&program, port);
    let dir = tempfile::tempdir().unwrap();
    let log = log(dir.path());
    let mut sent = sink(dir.path(), &brokers);
    for round in 0..5 {
        write(&log, 200 * round..200 * round + 150).await;
        broker = broker.restart();
        write(&log, 200 * round + 150..200 * round + 200).await;
        // Every other time the coordinator dies, too.
        if round % 2 == 1 {
            drop(sent);
            sent = sink(dir.path(), &brokers);
        }
    }
    let give_up = Instant::now() + Duration::from_secs(180);
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let counts = sent.counts();
        if counts.behind == 0 && counts.events > 0 && !counts.is_failing {
            break;
        }
        assert!(Instant::now() < give_up, "{counts:?}");
    }
    println!("1000 events, and {} repeats with the same ids", check(&all_of(&brokers), 1000));
    drop(broker);
}
