use super::*;
use proptest::prelude::*;

const LIMITS: Limits = Limits { bytes: 100, recordings: 3, keep: Duration::from_secs(60), grace: Duration::from_secs(10) };

const ME: Digest = [200; 32];
const OTHER: Digest = [201; 32];

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key(n: u8) -> Digest {
    [n; 32]
}

fn seat(asked: Lookup<u8>) -> Seat {
    match asked {
        Lookup::Begun(seat) | Lookup::Joined { seat, .. } => seat,
        other => panic!("{other:?}"),
    }
}

fn all(recordings: &mut Recordings<u8, u64>, seat: Seat) -> (Vec<u64>, bool) {
    let mut frames = Vec::new();
    loop {
        match recordings.read(seat) {
            Read::Frame(frame) => frames.push(frame),
            Read::Wait => return (frames, false),
            Read::End => return (frames, true),
        }
    }
}

#[test]
fn a_repeat_hears_everything_and_goes_on_live() {
    let mut recordings = Recordings::new(LIMITS);
    let first = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    for n in 0..3 {
        recordings.append(first.recording, n, 5, true);
    }
    let Lookup::Joined { seat: second, tag: 7, ended: false } = recordings.ask(ME, key(1), key(9), None, || 8) else { panic!() };
    assert_eq!(all(&mut recordings, second), (vec![0, 1, 2], false));
    recordings.append(first.recording, 3, 5, true);
    recordings.end(at(1), first.recording, true);
    assert_eq!(all(&mut recordings, second), (vec![3], true));
    assert_eq!(all(&mut recordings, first), (vec![0, 1, 2, 3], true));
    let third = seat(recordings.ask(ME, key(1), key(9), Some(1), || 8));
    assert_eq!(all(&mut recordings, third), (vec![2, 3], true));
    assert_eq!(recordings.ask(ME, key(1), key(8), None, || 8), Lookup::OtherBody);
}

#[test]
fn a_listener_that_is_ahead_hears_only_what_is_new() {
    let mut recordings = Recordings::new(LIMITS);
    let ahead = seat(recordings.ask(ME, key(1), key(9), Some(1), || 7));
    // A comment comes before the first event, and one after the second: the first is skipped.
    for (frame, event) in [(100, false), (0, true), (1, true), (2, true), (101, false), (3, true)] {
        recordings.append(ahead.recording, frame, 1, event);
    }
    assert_eq!(all(&mut recordings, ahead), (vec![2, 101, 3], false));
}

#[test]
fn names_find_what_can_be_joined() {
    let mut recordings = Recordings::new(LIMITS);
    let first = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    recordings.name(first.recording, key(50));
    recordings.append(first.recording, 0, 1, true);
    let found = seat(recordings.find(&key(50), None).unwrap());
    assert_eq!(all(&mut recordings, found), (vec![0], false));
    assert!(recordings.find(&key(51), None).is_none());
    recordings.end(at(0), first.recording, false);
    assert!(recordings.find(&key(50), None).is_none(), "a failure is not for others");
    assert_eq!(all(&mut recordings, found), (vec![], true));
    assert!(matches!(recordings.ask(ME, key(1), key(8), None, || 8), Lookup::Begun(_)), "its key is free again");
}

#[test]
fn nobody_listens_for_a_while() {
    let mut recordings = Recordings::<u8, u64>::new(LIMITS);
    let first = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    let second = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    recordings.leave(at(0), first);
    assert!(recordings.expire(at(100)).is_empty(), "another listens");
    recordings.leave(at(100), second);
    assert!(recordings.expire(at(109)).is_empty());
    let back = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    assert!(recordings.expire(at(120)).is_empty(), "somebody came back");
    recordings.leave(at(120), back);
    assert_eq!(recordings.expire(at(130)), [7]);
    assert!(!recordings.has(&key(1)));
    recordings.end(at(130), first.recording, false);
    assert_eq!(recordings.counts(), Counts { abandoned: 1, ..Counts::default() });
}

#[test]
fn a_flood_drives_out_nothing_but_itself() {
    let mut recordings = Recordings::new(Limits { recordings: 4, ..LIMITS });
    let mut record = |tenant, n: u8, bytes| {
        let seat = match recordings.ask(tenant, key(n), key(9), None, || n) {
            Lookup::Begun(seat) => seat,
            _ => return false,
        };
        let taken = recordings.append(seat.recording, 0, bytes, true);
        recordings.end(at(u64::from(n)), seat.recording, true);
        recordings.leave(at(u64::from(n)), seat);
        recordings.check_integrity();
        taken == Append::Taken
    };
    assert!(record(ME, 1, 40));
    for n in 2..50 {
        record(OTHER, n, 45);
    }
    assert!(recordings.has(&key(1)) && recordings.has(&key(49)) && !recordings.has(&key(48)));
    let record_empty = |recordings: &mut Recordings<u8, u64>, tenant, n: u8| {
        if let Lookup::Begun(seat) = recordings.ask(tenant, key(n), key(9), None, || n) {
            recordings.end(at(u64::from(n)), seat.recording, true);
            recordings.leave(at(u64::from(n)), seat);
        }
    };
    for n in 50..100 {
        record_empty(&mut recordings, OTHER, n);
    }
    assert!(recordings.has(&key(1)), "nor by their number");
    record_empty(&mut recordings, ME, 101);
    assert!(recordings.has(&key(1)) && recordings.has(&key(101)), "what was borrowed is given back");
}

#[test]
fn the_oldest_ended_go_first_and_all_go_in_time() {
    let mut recordings = Recordings::new(LIMITS);
    for n in 0..3 {
        let seat = seat(recordings.ask(ME, key(n), key(9), None, || n));
        recordings.append(seat.recording, 0, 10, true);
        if n > 0 {
            recordings.end(at(u64::from(10 - n)), seat.recording, true);
            recordings.leave(at(10), seat);
        }
    }
    // Recording 0 runs, 2 ended before 1.
    let last = seat(recordings.ask(ME, key(3), key(9), None, || 3));
    let kept = |recordings: &Recordings<u8, u64>| (0..4).map(|n| recordings.has(&key(n))).collect::<Vec<_>>();
    assert_eq!(kept(&recordings), [true, true, false, true]);
    recordings.append(last.recording, 0, 85, true);
    assert_eq!(kept(&recordings), [true, false, false, true]);
    recordings.end(at(20), last.recording, true);
    recordings.expire(at(80));
    assert_eq!(kept(&recordings), [true, false, false, false]);
    assert_eq!(all(&mut recordings, last), (vec![0], true), "who listens hears it to its end");
    let counts = recordings.counts();
    assert_eq!((counts.evicted, counts.expired, counts.running), (2, 1, 1));
}

#[test]
fn without_room_a_recording_passes_and_waits_for_its_listeners() {
    let mut recordings = Recordings::new(LIMITS);
    let first = seat(recordings.ask(ME, key(1), key(9), None, || 7));
    assert_eq!(recordings.append(first.recording, 0, 90, true), Append::Taken);
    assert_eq!(recordings.append(first.recording, 1, 90, true), Append::Full);
    assert!(!recordings.has(&key(1)));
    assert_eq!(recordings.read(first), Read::Frame(0));
    assert_eq!(recordings.append(first.recording, 1, 90, true), Append::Taken);
    assert_eq!(all(&mut recordings, first), (vec![1], false));
    recordings.leave(at(5), first);
    assert_eq!(recordings.expire(at(5)), [7], "nobody could come back");
    assert_eq!(
        Recordings::<u8, u64>::new(Limits { bytes: 0, ..LIMITS }).ask(ME, key(1), key(9), None, || 7),
        Lookup::NoRoom,
        "without bytes nothing is recorded"
    );
}

#[derive(Clone, Debug)]
enum Step {
    Ask { key: u8, after: Option<u64> },
    Append { recording: usize, bytes: u64, event: bool },
    Read { listener: usize, frames: usize },
    Leave { listener: usize },
    End { recording: usize, whole: bool },
    Expire { seconds: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u8..5, proptest::option::weighted(0.3, 0u64..8)).prop_map(|(key, after)| Step::Ask { key, after }),
        6 => (0usize..8, 0u64..40, proptest::bool::weighted(0.8)).prop_map(|(recording, bytes, event)| Step::Append { recording, bytes, event }),
        5 => (0usize..8, 1usize..6).prop_map(|(listener, frames)| Step::Read { listener, frames }),
        1 => (0usize..8).prop_map(|listener| Step::Leave { listener }),
        1 => (0usize..8, any::<bool>()).prop_map(|(recording, whole)| Step::End { recording, whole }),
        1 => (0u64..30).prop_map(|seconds| Step::Expire { seconds }),
    ]
}

/// A recording as its maker sees it.
struct Made {
    id: u64,
    /// All accepted frames, with each event's number.
    frames: Vec<(u64, Option<u64>)>,
    running: bool,
}

struct Hearing {
    seat: Seat,
    recording: usize,
    after: Option<u64>,
    heard: Vec<u64>,
}

impl Hearing {
    /// The frames that the listener should have received in the end.
    fn due(&self, made: &Made) -> Vec<u64> {
        made.frames.iter().filter(|(_, number)| self.after.is_none() || *number > self.after).map(|(frame, _)| *frame).collect()
    }
}

proptest! {
    /// However listeners join, leave and dawdle, each receives each of its frames once, in order; and the limits hold.
    #[test]
    fn every_listener_hears_every_event_once(steps in proptest::collection::vec(step(), 1..300)) {
        let mut recordings = Recordings::<usize, u64>::new(LIMITS);
        let mut now = Duration::ZERO;
        let mut made: Vec<Made> = Vec::new();
        let mut hearing: Vec<Hearing> = Vec::new();
        let mut frames = 0;
        for step in steps {
            match step {
                Step::Ask { key: n, after } => match recordings.ask(ME, key(n), key(9), after, || made.len()) {
                    Lookup::Begun(seat) => {
                        hearing.push(Hearing { seat, recording: made.len(), after, heard: Vec::new() });
                        made.push(Made { id: seat.recording, frames: Vec::new(), running: true });
                    }
                    Lookup::Joined { seat, tag, ended } => {
                        prop_assert_eq!(ended, !made[tag].running);
                        hearing.push(Hearing { seat, recording: tag, after, heard: Vec::new() });
                    }
                    Lookup::OtherBody => prop_assert!(false),
                    Lookup::NoRoom => {}
                },
                Step::Append { recording, bytes, event } => {
                    let mut running: Vec<_> = made.iter_mut().filter(|made| made.running).collect();
                    let Some(len) = (!running.is_empty()).then_some(running.len()) else { continue };
                    let made = &mut running[recording % len];
                    let number = recordings.next_event(made.id);
                    if recordings.append(made.id, frames, bytes, event) == Append::Taken {
                        made.frames.push((frames, if event { Some(number) } else { number.checked_sub(1) }));
                        frames += 1;
                    }
                }
                Step::Read { listener, frames } => {
                    let Some(len) = (!hearing.is_empty()).then_some(hearing.len()) else { continue };
                    let hearing = &mut hearing[listener % len];
                    for _ in 0..frames {
                        if let Read::Frame(frame) = recordings.read(hearing.seat) {
                            hearing.heard.push(frame);
                        }
                    }
                    prop_assert!(hearing.due(&made[hearing.recording]).starts_with(&hearing.heard));
                }
                Step::Leave { listener } => {
                    if !hearing.is_empty() {
                        let left = hearing.swap_remove(listener % hearing.len());
                        recordings.leave(now, left.seat);
                    }
                }
                Step::End { recording, whole } => {
                    let mut running: Vec<_> = made.iter_mut().filter(|made| made.running).collect();
                    let Some(len) = (!running.is_empty()).then_some(running.len()) else { continue };
                    running[recording % len].running = false;
                    recordings.end(now, running[recording % len].id, whole);
                }
                Step::Expire { seconds } => {
                    now += Duration::from_secs(seconds);
                    for given_up in recordings.expire(now) {
                        prop_assert!(made[given_up].running);
                        prop_assert!(hearing.iter().all(|hearing| hearing.recording != given_up), "somebody listens");
                        made[given_up].running = false;
                        recordings.end(now, made[given_up].id, false);
                    }
                }
            }
            recordings.check_integrity();
            // One frame per running recording may exceed the limit.
            prop_assert!(recordings.bytes() <= LIMITS.bytes + 40 * LIMITS.recordings as u64);
        }
        for made in made.iter_mut().filter(|made| made.running) {
            made.running = false;
            recordings.end(now, made.id, true);
        }
        for mut hearing in hearing {
            loop {
                match recordings.read(hearing.seat) {
                    Read::Frame(frame) => hearing.heard.push(frame),
                    Read::Wait => prop_assert!(false, "all have ended"),
                    Read::End => break,
                }
            }
            prop_assert_eq!(&hearing.heard, &hearing.due(&made[hearing.recording]));
            recordings.leave(now, hearing.seat);
        }
        recordings.expire(now + LIMITS.keep);
        recordings.check_integrity();
        prop_assert_eq!((recordings.counts().recordings, recordings.bytes()), (0, 0));
    }
}
