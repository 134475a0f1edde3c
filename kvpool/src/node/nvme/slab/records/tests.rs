//! The contract of all stores.

use super::*;
use std::os::unix::fs::FileExt;

const BOTH: &[RecordStore] = &[
    RecordStore::File,
    #[cfg(feature = "rocksdb")]
    RecordStore::RocksDb,
];

fn each(test: impl Fn(&Path, RecordStore)) {
    for &store in BOTH {
        let dir = tempfile::tempdir().unwrap();
        println!("{store:?}");
        test(dir.path(), store);
    }
}

fn open(dir: &Path, store: RecordStore) -> Records {
    Records::open(dir, store).unwrap()
}

fn all(records: &Records) -> Vec<(u64, u64)> {
    records.read_from(0).collect()
}

#[test]
fn records_are_there_after_they_are_opened_again() {
    each(|dir, store| {
        let first = open(dir, store);
        first.write([0, 3, 7, 10_000].map(|number| (number, number * 10))).unwrap();
        first.write([(7, 1_u64)]).unwrap();
        first.erase(3).unwrap();
        drop(first);
        let again = open(dir, store);
        assert_eq!((again.read::<u64>(0), again.read::<u64>(3), again.read::<u64>(11)), (Some(0), None, None));
        assert_eq!(again.read_from::<u64>(1).collect::<Vec<_>>(), [(7, 1), (10_000, 100_000)]);
        again.clear().unwrap();
        assert_eq!(all(&again), []);
        again.write([(5, 5_u64)]).unwrap();
        drop(again);
        assert_eq!(all(&open(dir, store)), [(5, 5)]);
    });
}

#[test]
fn many_records_come_in_their_order_each_once() {
    each(|dir, store| {
        let records = open(dir, store);
        let numbers = |step| (0..30_000).step_by(step);
        records.write(numbers(2).map(|number| (number, number))).unwrap();
        records.write(numbers(3).map(|number| (number, number + 1))).unwrap();
        let expected = numbers(1).filter(|n| n % 2 == 0 || n % 3 == 0).map(|n| (n, if n % 3 == 0 { n + 1 } else { n }));
        assert_eq!(all(&records), expected.collect::<Vec<_>>());
    });
}

#[test]
fn a_value_of_another_kind_says_nothing() {
    each(|dir, store| {
        let records = open(dir, store);
        records.write([(1, "nonsense")]).unwrap();
        records.write([(2, 2_u64)]).unwrap();
        assert_eq!(records.read::<u64>(1), None);
        assert_eq!(all(&records), [(2, 2)]);
    });
}

#[test]
fn one_process_has_them_at_a_time_whichever_store_it_uses() {
    each(|dir, store| {
        let first = open(dir, store);
        for &other in BOTH {
            assert_eq!(Records::open(dir, other).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        drop(first);
        open(dir, store);
    });
}

#[test]
fn what_another_store_left_is_gone() {
    each(|dir, store| {
        open(dir, store).write([(1, 1_u64)]).unwrap();
        for &other in BOTH.iter().filter(|&&other| other != store) {
            assert_eq!(all(&open(dir, other)), []);
            assert_eq!(all(&open(dir, store)), []);
        }
    });
}

#[test]
fn a_torn_or_misplaced_record_of_the_file_says_nothing() {
    const RECORD_BYTES: u64 = 128;
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path(), RecordStore::File);
    records.write((0..4).map(|number| (number, number))).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(dir.path().join(FILE)).unwrap();
    let mut record = [0; RECORD_BYTES as usize];
    file.read_exact_at(&mut record, RECORD_BYTES).unwrap();
    file.write_all_at(&record, 2 * RECORD_BYTES).unwrap();
    file.write_all_at(&[9], 3 * RECORD_BYTES + 20).unwrap();
    assert_eq!(all(&records), [(0, 0), (1, 1)]);
}

#[cfg(feature = "rocksdb")]
mod rocks {
    use super::*;

    const RECORDS: u64 = 200_000;

    /// The files of records, and where their content is.
    fn tables(dir: &Path) -> Vec<std::path::PathBuf> {
        let files = fs::read_dir(dir.join(ROCKS)).unwrap().map(|file| file.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|name| name == "sst")).collect()
    }

    /// A database whose records are in files, and none in its log.
    fn filled(dir: &Path) {
        let records = open(dir, RecordStore::RocksDb);
        (0..RECORDS / 1000).for_each(|n| records.write((n * 1000..(n + 1) * 1000).map(|number| (number, number * 7))).unwrap());
        drop(records);
        // The log's records go to files when it is opened.
        drop(open(dir, RecordStore::RocksDb));
        assert!(!tables(dir).is_empty());
    }

    #[test]
    fn a_broken_block_hides_its_own_records_and_the_next_start_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        filled(dir.path());
        for table in tables(dir.path()) {
            let file = OpenOptions::new().write(true).open(table).unwrap();
            file.write_all_at(&[0x55; 64], file.metadata().unwrap().len() / 3).unwrap();
        }
        let records = open(dir.path(), RecordStore::RocksDb);
        let left = all(&records);
        assert!(left.iter().all(|&(number, value)| value == number * 7));
        assert!(left.len() < RECORDS as usize && left.len() > RECORDS as usize * 9 / 10, "{}", left.len());
        // It takes writes, merges its files, and has no error any more.
        (0..RECORDS / 1000).for_each(|n| records.write((n * 1000..(n + 1) * 1000).map(|number| (number, number * 7))).unwrap());
        assert_eq!(all(&records).len(), RECORDS as usize);
        drop(records);
        assert_eq!(all(&open(dir.path(), RecordStore::RocksDb)).len(), RECORDS as usize);
    }

    #[test]
    fn a_database_that_does_not_open_is_replaced() {
        for break_it in [
            |dir: &Path| fs::remove_file(&tables(dir)[0]).unwrap(),
            |dir: &Path| fs::write(dir.join(ROCKS).join("CURRENT"), "nonsense").unwrap(),
        ] {
            let dir = tempfile::tempdir().unwrap();
            filled(dir.path());
            break_it(dir.path());
            let records = open(dir.path(), RecordStore::RocksDb);
            assert_eq!(all(&records), []);
            records.write([(1, 1_u64)]).unwrap();
            drop(records);
            assert_eq!(all(&open(dir.path(), RecordStore::RocksDb)), [(1, 1)]);
        }
    }

    #[test]
    fn a_record_in_the_wrong_place_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path(), RecordStore::RocksDb);
        records.write([(1, 1_u64), (2, 2)]).unwrap();
        drop(records);
        let path = dir.path().join(ROCKS);
        let db = rocksdb::DB::open_default(&path).unwrap();
        let of_1 = db.get(1_u64.to_be_bytes()).unwrap().unwrap();
        db.put(2_u64.to_be_bytes(), of_1).unwrap();
        db.put(b"foreign", b"nonsense").unwrap();
        drop(db);
        assert_eq!(all(&open(dir.path(), RecordStore::RocksDb)), [(1, 1)]);
    }
}
