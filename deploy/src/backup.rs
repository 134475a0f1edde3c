//! `tidemill backup` and `tidemill restore`: what a coordinator keeps, written to a file while it runs, and to an empty data directory.

use crate::operators::TokenArgs;
use anyhow::{Context, bail, ensure};
use rusqlite::{Connection, OpenFlags};
use serde_json::Value;
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, BufReader, BufWriter, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tidemill_tenancy::archive::{self, Manifest};

/// The longest silence of a coordinator: it copies everything before it sends anything.
const SILENCE_MAX: Duration = Duration::from_secs(1800);
/// The time for which orders to erase are kept: what is older may have what none of them names any more.
const ORDERS_KEPT_DAYS: u64 = 90;
/// The directory in which a backup is unpacked and checked, in the data directory.
const UNPACKED: &str = "restore.part";
/// The files that tell of what several coordinators agreed on.
const AGREED: [&str; 2] = ["tenants.sqlite", archive::RECORDS];

#[derive(Debug, clap::Args)]
pub struct BackupArgs {
    /// File to write; there must be none yet
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The coordinator's --admin address: each of several has data of its own
    #[arg(long, default_value = "http://127.0.0.1:9100")]
    url: String,
    #[command(flatten)]
    token: TokenArgs,
}

/// Writes a backup, and checks it.
pub async fn backup(args: BackupArgs) -> anyhow::Result<()> {
    let out = args.out.display().to_string();
    ensure!(!args.out.exists(), "there is a file {out} already: a backup never replaces one");
    // Beside its place, so that a backup that broke off is never taken for one.
    let part = PathBuf::from(format!("{out}.part"));
    let made = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&part);
    let mut file = made.with_context(|| format!("cannot write {}", part.display()))?;
    let written = async {
        download(&args.url, &args.token, &mut file).await?;
        file.sync_all()?;
        let manifest = archive::read(BufReader::new(File::open(&part)?), |_| Ok(io::sink()))?;
        fs::hard_link(&part, &args.out).with_context(|| format!("cannot give the backup its name {out}"))?;
        anyhow::Ok(manifest)
    };
    let written = written.await;
    let _ = fs::remove_file(&part);
    let manifest = written?;
    println!("{out}: backup of {}, {} bytes, checked", manifest.coordinator, fs::metadata(&args.out)?.len());
    show_left_out(&manifest);
    Ok(())
}

async fn download(url: &str, token: &TokenArgs, to: &mut File) -> anyhow::Result<()> {
    let client = token.client()?.read_timeout(SILENCE_MAX).build()?;
    let mut address = reqwest::Url::parse(url).with_context(|| format!("`{url}` is no URL such as http://127.0.0.1:9100"))?;
    address.set_path("/admin/backup");
    let unreachable = || format!("no answer from {url}: is this a coordinator's --admin address?");
    let mut response = client.get(address).send().await.map_err(reqwest::Error::without_url).with_context(unreachable)?;
    if !response.status().is_success() {
        let answer: Value = response.json().await.unwrap_or_default();
        bail!("{}", answer["error"]["message"].as_str().unwrap_or("no reason was given"));
    }
    while let Some(bytes) = response.chunk().await.context("the backup broke off: the coordinator's log says why")? {
        to.write_all(&bytes)?;
    }
    Ok(())
}

fn show_left_out(manifest: &Manifest) {
    manifest.left_out.iter().for_each(|what| println!("not in it: {what}"));
}

#[derive(Debug, clap::Args)]
pub struct RestoreArgs {
    /// File that `tidemill backup` wrote
    file: PathBuf,
    /// Data directory: empty, or none yet, of a coordinator that does not run
    #[arg(long, value_name = "DIR", required_unless_present = "check")]
    data: Option<PathBuf>,
    /// Only check the file
    #[arg(long)]
    check: bool,
    /// Restore tenants, keys and records as well, of several coordinators that have all lost their registry
    #[arg(long)]
    group_lost: bool,
    /// Restore a backup that is older than the orders to erase that are still known
    #[arg(long)]
    old: bool,
}

/// Restores a backup: all of it or nothing.
pub fn restore(args: &RestoreArgs) -> anyhow::Result<()> {
    let open = || File::open(&args.file).map(BufReader::new).with_context(|| format!("cannot read {}", args.file.display()));
    let Some(data) = args.data.as_ref().filter(|_| !args.check) else {
        let manifest = archive::read(open()?, |_| Ok(io::sink()))?;
        check_version(&manifest)?;
        println!("{}: whole; {}", args.file.display(), shown(&manifest));
        show_left_out(&manifest);
        return Ok(());
    };
    prepare(data)?;
    let unpacked = data.join(UNPACKED);
    let restored = unpack(open()?, &unpacked, args).and_then(|manifest| {
        move_up(&unpacked, data)?;
        Ok(manifest)
    });
    if restored.is_err() {
        let _ = fs::remove_dir_all(&unpacked);
    }
    let manifest = restored?;
    println!("{}: restored; {}", data.display(), shown(&manifest));
    show_left_out(&manifest);
    if manifest.coordinators > 1 && !args.group_lost {
        println!("left out: tenants, keys and records, which come from the other coordinators (all of them lost: --group-lost)");
    }
    println!("orders to erase that it knows are carried out again at its start; give those again that were given since it was taken");
    Ok(())
}

/// Checks that nothing is in the data directory, and makes it.
fn prepare(data: &Path) -> anyhow::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(data).with_context(|| format!("cannot make {}", data.display()))?;
    // An earlier attempt that was interrupted left nothing of use.
    let unpacked = data.join(UNPACKED);
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked)?;
    }
    // A disk's own directory is no data.
    let mut entries = fs::read_dir(data)?.filter_map(Result::ok).map(|entry| entry.file_name()).filter(|name| name != "lost+found");
    if let Some(name) = entries.next() {
        bail!(
            "{} is not empty ({} is in it): a backup is restored to an empty directory only. Move away what is there, or name another one",
            data.display(),
            name.display()
        );
    }
    Ok(())
}

fn unpack(from: impl io::Read, to: &Path, args: &RestoreArgs) -> anyhow::Result<Manifest> {
    let private = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
    private(to)?;
    let manifest = archive::read(from, |name| {
        let path = to.join(name);
        private(path.parent().unwrap_or(to))?;
        let file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
        Ok(Synced(BufWriter::new(file)))
    })?;
    check_version(&manifest)?;
    check_age(&manifest, args)?;
    if manifest.coordinators > 1 && !args.group_lost {
        for name in AGREED {
            remove(&to.join(name))?;
        }
    }
    check_databases(to)?;
    Ok(manifest)
}

/// A file that is on the disk when it is flushed.
struct Synced(BufWriter<File>);

impl Write for Synced {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()?;
        self.0.get_ref().sync_all()
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Refuses what a later version wrote: its stores may have another form.
fn check_version(manifest: &Manifest) -> anyhow::Result<()> {
    let number = |version: &str| version.split('.').map(|part| part.parse::<u64>().unwrap_or(0)).collect::<Vec<_>>();
    let own = env!("CARGO_PKG_VERSION");
    ensure!(
        number(&manifest.version) <= number(own),
        "this backup was written by version {}, and this is {own}: restore it with that version or a later one",
        manifest.version
    );
    Ok(())
}

fn check_age(manifest: &Manifest, args: &RestoreArgs) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let days = now.saturating_sub(manifest.taken) / (24 * 3600);
    ensure!(
        args.old || days < ORDERS_KEPT_DAYS,
        "this backup is {days} days old, and orders to erase are kept for {ORDERS_KEPT_DAYS}: it may have what was erased since, and no \
         order names it any more. If you can repeat the orders of that time, say --old"
    );
    Ok(())
}

/// Checks each database by SQLite's own means.
fn check_databases(dir: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            check_databases(&path)?;
        } else if path.extension().is_some_and(|end| end == "sqlite") {
            let check = || {
                let database = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
                let found = database.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0))?;
                // It must be whole by itself.
                database.query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(()))?;
                rusqlite::Result::<String>::Ok(found)
            };
            let name = path.file_name().unwrap_or_default().display().to_string();
            let found = check().with_context(|| format!("{name} of this backup is no database"))?;
            ensure!(found == "ok", "{name} of this backup is damaged: {found}");
        }
    }
    Ok(())
}

/// Moves everything to its place.
fn move_up(from: &Path, to: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::rename(entry.path(), to.join(entry.file_name()))?;
    }
    fs::remove_dir(from)?;
    File::open(to)?.sync_all()?;
    Ok(())
}

fn shown(manifest: &Manifest) -> String {
    let Manifest { coordinator, version, taken, .. } = manifest;
    let taken = time_text(*taken);
    format!("backup of {coordinator} by version {version}, taken {taken}")
}

fn time_text(unix_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now.saturating_sub(unix_s) {
        s @ 0..120 => format!("{s} s ago"),
        s @ 120..7200 => format!("{} min ago", s / 60),
        s @ 7200..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} days ago", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let taken = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        Manifest {
            format: archive::FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            coordinator: "c0".into(),
            coordinators: 1,
            taken,
            left_out: Vec::new(),
        }
    }

    /// A backup with tenants and something that is no database.
    fn write(dir: &Path, manifest: &Manifest) -> PathBuf {
        let database = dir.join("some.sqlite");
        if !database.exists() {
            Connection::open(&database).unwrap().execute_batch("CREATE TABLE records (id TEXT); PRAGMA user_version = 1;").unwrap();
            fs::write(dir.join("some.json"), "[]").unwrap();
        }
        let mut writer = archive::Writer::new(Vec::new(), manifest).unwrap();
        for (name, file) in
            [("tenants.sqlite", "some.sqlite"), ("usage/000000000001.sqlite", "some.sqlite"), (archive::RECORDS, "some.json")]
        {
            writer.file(name, &dir.join(file)).unwrap();
        }
        let path = dir.join("backup.tar");
        fs::write(&path, writer.finish().unwrap()).unwrap();
        path
    }

    fn args(file: PathBuf, data: PathBuf) -> RestoreArgs {
        RestoreArgs { file, data: Some(data), check: false, group_lost: false, old: false }
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_backup_comes_back_to_an_empty_directory_only() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(write(dir.path(), &manifest()), dir.path().join("data"));
        restore(&args).unwrap();
        assert_eq!(names(args.data.as_ref().unwrap()), [archive::RECORDS, "tenants.sqlite", "usage"]);
        let error = restore(&args).unwrap_err().to_string();
        assert!(error.contains("is not empty") && error.contains("Move away"), "{error}");
    }

    #[test]
    fn what_several_agreed_on_comes_back_only_if_all_have_lost_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = write(dir.path(), &Manifest { coordinators: 3, ..manifest() });
        let one = args(file.clone(), dir.path().join("one"));
        restore(&one).unwrap();
        assert_eq!(names(one.data.as_ref().unwrap()), ["usage"]);
        let all = RestoreArgs { group_lost: true, ..args(file, dir.path().join("all")) };
        restore(&all).unwrap();
        assert_eq!(names(all.data.as_ref().unwrap()), [archive::RECORDS, "tenants.sqlite", "usage"]);
    }

    #[test]
    fn what_is_wrong_leaves_the_directory_empty_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let whole = fs::read(write(dir.path(), &manifest())).unwrap();
        let later = fs::read(write(dir.path(), &Manifest { version: "999.0.0".into(), ..manifest() })).unwrap();
        let former = fs::read(write(dir.path(), &Manifest { taken: 1_600_000_000, ..manifest() })).unwrap();
        let mut flipped = whole.clone();
        flipped[5000] ^= 16;
        for (bytes, words) in [
            (&whole[..whole.len() / 2], "too early"),
            (&flipped[..], "is not what was written"),
            (&b"something else"[..], "no backup of Tidemill"),
            (&later[..], "version 999.0.0"),
            (&former[..], "--old"),
        ] {
            let file = dir.path().join("wrong.tar");
            fs::write(&file, bytes).unwrap();
            let args = args(file, dir.path().join("data"));
            let error = format!("{:#}", restore(&args).unwrap_err());
            assert!(error.contains(words), "{words}: {error}");
            assert!(names(args.data.as_ref().unwrap()).is_empty(), "{words}");
        }
    }
}
