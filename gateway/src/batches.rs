//! Clients' files and batches: kept in the data directory, and run from there, each request as if its client had just sent it. All of it
//! survives this process: a batch resumes where its files of answers end.
//!
//! - [`disk`]: the layout on disk, and how files get there; `journal`: a batch's answers so far; `begun`: its running requests; `reserve`: the
//!   space that they leave free
//! - `runner`: a batch from its file to its end

mod begun;
pub mod disk;
mod journal;
mod reserve;
mod runner;

use crate::{
    base::{
        owner::{Erasing, Whose, tenant_of},
        places::Places,
        shares::Shares,
        stamp::{new_id, unix_ms, unix_seconds},
    },
    batch::{
        file::{INPUT, NoRoom, OUTPUT, Room, StoredFile, Used},
        input::Problem,
        life::{Batch, NewBatch, Sender},
    },
};
use disk::{Disk, Kind, Upload};
use parking_lot::Mutex;
use reserve::{CHECK_EVERY_BYTES, Reserve};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::Notify;

/// The maximum number of one tenant's batches that have not ended.
const OPEN_MAX: usize = 64;
/// The maximum number of one tenant's batches that are kept; beyond this, those that ended first go.
const KEPT_MAX: usize = 2000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of one file of requests.
    pub file_bytes: u64,
    /// The maximum number of requests in it.
    pub lines: usize,
    /// The room of one tenant, for all its users.
    pub room: Room,
    /// The maximum size of all tenants' files.
    pub total_bytes: u64,
    /// The free space of the disk below which no more is written for clients.
    pub reserve_bytes: u64,
    /// The age at which files are deleted, unless a batch still reads them; `None` keeps them.
    pub files_age: Option<Duration>,
    /// The time since their end after which batches are deleted; `None` keeps them.
    pub batches_age: Option<Duration>,
    /// The maximum number of concurrent requests of all batches.
    pub at_once: usize,
    /// The maximum size of one request.
    pub line_bytes: usize,
}

#[derive(Debug)]
pub struct Batches {
    disk: Disk,
    reserve: Reserve,
    limits: Limits,
    index: Mutex<Index>,
    /// Serializes writes of batches, so that the last change is the one that stays.
    saving: tokio::sync::Mutex<()>,
    /// Notified when a batch is created.
    come: Notify,
    /// Places of running requests.
    places: Places,
    /// The name of this process.
    process: String,
    /// Held by a request that may have ended a process: no other such request runs beside it, so that the guilty one can be told.
    alone: tokio::sync::Mutex<()>,
}

/// All files and batches in memory, without the files' contents.
#[derive(Debug, Default)]
struct Index {
    files: BTreeMap<String, StoredFile>,
    batches: BTreeMap<String, Entry>,
    /// Uploads with their owners, and their sizes so far.
    arriving: BTreeMap<String, (String, u64)>,
}

#[derive(Debug)]
struct Entry {
    batch: Batch,
    /// Notified when a client cancels it.
    cancelled: Arc<Notify>,
    /// Whether a runner has taken it.
    taken: bool,
    /// The size of its answers until they are a file.
    answers_bytes: u64,
}

impl Entry {
    fn new(batch: Batch) -> Self {
        Self { batch, cancelled: Arc::default(), taken: false, answers_bytes: 0 }
    }

    fn is_of(&self, owner: &str) -> bool {
        self.batch.sender.owner() == owner
    }

    fn tenant(&self) -> &str {
        self.batch.sender.tenant.as_deref().unwrap_or_default()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("files and batches in {path}: {source}")]
pub struct OpenError {
    path: PathBuf,
    source: io::Error,
}

#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The file or batch was never stored, was deleted or expired, or belongs to a different owner.
    #[error("`{0}` does not exist here (any more)")]
    NotFound(String),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("the file is larger than {0} bytes")]
    TooLarge(u64),
    #[error("`{file}` is the input of `{batch}`, which has not ended: cancel it first")]
    InUse { file: String, batch: String },
    #[error("`{file}` is for `{purpose}`: a batch's input is stored with `purpose` `{INPUT}`")]
    Purpose { file: String, purpose: String },
    #[error("your tenant has {OPEN_MAX} batches that have not ended, and may have no more")]
    TooMany,
    #[error("`{0}` is {1}: it is too late to cancel it")]
    Over(String, String),
    #[error("the data directory has failed: {0}")]
    Disk(#[from] io::Error),
}

/// A page of a list, the latest items first.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The page starts after this id.
    pub after: Option<String>,
    pub limit: usize,
    pub ascending: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Listed<T> {
    pub items: Vec<T>,
    pub has_more: bool,
}

impl Batches {
    /// Loads the stored files and batches. Steps that a crash left incomplete are finished or undone.
    pub fn open(root: &Path, limits: Limits) -> Result<Self, OpenError> {
        let failed = |source| OpenError { path: root.to_owned(), source };
        let disk = Disk::open(root.to_owned()).map_err(failed)?;
        let files: Vec<StoredFile> = disk.load(Kind::File).map_err(failed)?;
        let batches: Vec<Batch> = disk.load(Kind::Batch).map_err(failed)?;
        let index = Index {
            // The limit may have been longer when a file was stored.
            files: files.into_iter().map(|file| (file.id.clone(), file.with_age(limits.files_age))).collect(),
            batches: batches.into_iter().map(|batch| (batch.id.clone(), Entry::new(batch))).collect(),
            arriving: BTreeMap::new(),
        };
        let named = |id: &str| {
            let finishing = index.batches.values().map(|entry| &entry.batch).filter(|batch| !batch.is_over());
            let mut outputs = finishing.flat_map(|batch| [&batch.output_file, &batch.error_file]).flatten();
            index.files.contains_key(id) || outputs.any(|output| output == id)
        };
        disk.remove_contents_unless(named).map_err(failed)?;
        disk.remove_journals_unless(|id| index.batches.get(id).is_some_and(|entry| !entry.batch.is_over())).map_err(failed)?;
        Ok(Self {
            disk,
            reserve: Reserve::new(root.to_owned(), limits.reserve_bytes),
            limits,
            index: Mutex::new(index),
            saving: tokio::sync::Mutex::new(()),
            come: Notify::new(),
            // None of several tenants takes all of them.
            places: Places::new(Shares::new(limits.at_once as u64, (limits.at_once as u64 - 1).max(1))),
            process: new_id("process_"),
            alone: tokio::sync::Mutex::default(),
        })
    }

    /// Notes in all unfinished batches that this process ends in an orderly way.
    pub fn stop(&self) {
        let open: Vec<_> =
            self.index.lock().batches.values().filter(|entry| !entry.batch.is_over()).map(|entry| entry.batch.id.clone()).collect();
        for id in open {
            if let Err(error) = begun::stop(&self.disk.begun(&id)) {
                tracing::warn!(batch = id, %error, "could not note that a batch was stopped: the next process will take it for a crash");
            }
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Starts an upload of this owner, if it has room. The caller holds a place for uploads.
    pub async fn upload(&self, owner: &str) -> Result<Arriving<'_>, BatchError> {
        self.check_room(owner, Used { files: 1, bytes: 0 }).await?;
        let id = new_id("file-");
        self.index.lock().arriving.insert(id.clone(), (owner.to_owned(), 0));
        let counted = Counted { batches: self, id: id.clone(), owner: owner.to_owned(), bytes: 0 };
        Ok(Arriving { upload: self.disk.upload(&id).await?, bytes: 0, counted })
    }

    /// Stores an uploaded file. `age_s` is its owner's limit on its age, up to the server's limit.
    pub async fn keep(&self, arrived: Arriving<'_>, owner: &str, filename: String, age_s: Option<u64>) -> Result<StoredFile, BatchError> {
        let Arriving { upload, bytes, mut counted } = arrived;
        let file = self.file(upload.id().to_owned(), owner, filename, INPUT, bytes, age_s);
        counted.grow_to(bytes).await?;
        upload.publish().await?;
        self.disk.save(Kind::File, &file.id, &file).await?;
        self.index.lock().files.insert(file.id.clone(), file.clone());
        Ok(file)
    }

    /// Checks whether more fits: on the disk, beside what all tenants have, and beside the files of one tenant and the answers of its batches
    /// so far.
    async fn check_room(&self, owner: &str, more: Used) -> Result<(), NoRoom> {
        self.reserve.check().await?;
        let index = self.index.lock();
        let (bytes, max) = (index.used(|_| true).bytes.saturating_add(more.bytes), self.limits.total_bytes);
        if bytes > max {
            return Err(NoRoom::Total { bytes, max });
        }
        self.limits.room.check(index.used(|tenant| tenant == tenant_of(owner)), more)
    }

    /// Checks whether the tenant of a batch has room for more answers.
    async fn check_answers(&self, owner: &str) -> Result<(), NoRoom> {
        self.check_room(owner, Used { files: 0, bytes: 1 }).await
    }

    /// Notes the size of a batch's answers so far.
    fn note_answers(&self, id: &str, bytes: u64) {
        if let Some(entry) = self.index.lock().batches.get_mut(id) {
            entry.answers_bytes = bytes;
        }
    }

    fn file(&self, id: String, owner: &str, filename: String, purpose: &str, bytes: u64, age_s: Option<u64>) -> StoredFile {
        let created_ms = unix_ms();
        let expires_at = age_s.map(|age| (created_ms / 1000).saturating_add(age));
        let file = StoredFile { id, owner: owner.to_owned(), filename, purpose: purpose.to_owned(), bytes, created_ms, expires_at };
        file.with_age(self.limits.files_age)
    }

    pub fn stored_file(&self, owner: &str, id: &str) -> Result<StoredFile, BatchError> {
        let now = unix_seconds();
        let index = self.index.lock();
        let file = index.files.get(id).filter(|file| file.owner == owner && !file.is_old(now));
        file.cloned().ok_or_else(|| BatchError::NotFound(id.to_owned()))
    }

    /// Returns the path of a file's contents.
    pub fn content(&self, file: &StoredFile) -> PathBuf {
        self.disk.content(&file.id)
    }

    /// Lists an owner's files. With `purpose`, files of other purposes are left out.
    pub fn files(&self, owner: &str, purpose: Option<&str>, page: &Page) -> Result<Listed<StoredFile>, BatchError> {
        let now = unix_seconds();
        let index = self.index.lock();
        let shown = |file: &&StoredFile| file.owner == owner && !file.is_old(now) && purpose.is_none_or(|purpose| purpose == file.purpose);
        page.of(index.files.values().filter(shown).cloned().map(|file| (file.created_ms, file.id.clone(), file)).collect())
    }

    pub async fn delete_file(&self, owner: &str, id: &str) -> Result<(), BatchError> {
        self.stored_file(owner, id)?;
        {
            let mut index = self.index.lock();
            if let Some(batch) = index.user_of(id) {
                return Err(BatchError::InUse { file: id.to_owned(), batch: batch.to_owned() });
            }
            index.files.remove(id);
        }
        Ok(self.disk.remove_file(id).await?)
    }

    pub async fn create(&self, sender: Sender, wanted: NewBatch) -> Result<Batch, BatchError> {
        let owner = sender.owner();
        let file = self.stored_file(&owner, &wanted.input_file)?;
        if file.purpose != INPUT {
            return Err(BatchError::Purpose { file: file.id, purpose: file.purpose });
        }
        let batch = Batch::new(new_id("batch_"), sender, wanted, unix_ms());
        let forgotten = {
            let mut index = self.index.lock();
            let of_tenant = || index.batches.values().filter(|entry| entry.tenant() == tenant_of(&owner)).map(|entry| &entry.batch);
            if of_tenant().filter(|batch| !batch.is_over()).count() >= OPEN_MAX {
                return Err(BatchError::TooMany);
            }
            let forgotten = (of_tenant().count() >= KEPT_MAX)
                .then(|| of_tenant().filter_map(|batch| Some((batch.ended_at()?, batch.id.clone()))).min());
            // If the file is deleted from now on, the client is told of this batch.
            if !index.files.contains_key(&batch.input_file) {
                return Err(BatchError::NotFound(batch.input_file));
            }
            index.batches.insert(batch.id.clone(), Entry { taken: true, ..Entry::new(batch.clone()) });
            forgotten.flatten().map(|(_, id)| id)
        };
        if let Err(error) = self.save(&batch.id).await {
            self.index.lock().batches.remove(&batch.id);
            return Err(error.into());
        }
        if let Some(entry) = self.index.lock().batches.get_mut(&batch.id) {
            entry.taken = false;
        }
        if let Some(id) = forgotten {
            self.forget(&id).await?;
        }
        self.come.notify_one();
        Ok(batch)
    }

    pub fn batch(&self, owner: &str, id: &str) -> Result<Batch, BatchError> {
        let index = self.index.lock();
        let entry = index.batches.get(id).filter(|entry| entry.is_of(owner));
        entry.map(|entry| entry.batch.clone()).ok_or_else(|| BatchError::NotFound(id.to_owned()))
    }

    pub fn list(&self, owner: &str, page: &Page) -> Result<Listed<Batch>, BatchError> {
        let index = self.index.lock();
        let batches = index.batches.values().filter(|entry| entry.is_of(owner)).map(|entry| entry.batch.clone());
        page.of(batches.map(|batch| (batch.created_ms, batch.id.clone(), batch)).collect())
    }

    pub async fn cancel(&self, owner: &str, id: &str) -> Result<Batch, BatchError> {
        self.batch(owner, id)?;
        let mut in_time = false;
        let batch = self.change(id, |batch| in_time = batch.cancel(unix_seconds())).await?;
        if !in_time {
            let status = serde_json::to_value(batch.status).ok().and_then(|status| status.as_str().map(str::to_owned));
            return Err(BatchError::Over(batch.id, status.unwrap_or_default()));
        }
        if let Some(entry) = self.index.lock().batches.get(id) {
            entry.cancelled.notify_one();
        }
        Ok(batch)
    }

    /// Changes a batch, in memory and on disk.
    async fn change(&self, id: &str, change: impl FnOnce(&mut Batch)) -> Result<Batch, BatchError> {
        {
            let mut index = self.index.lock();
            let entry = index.batches.get_mut(id).ok_or_else(|| BatchError::NotFound(id.to_owned()))?;
            change(&mut entry.batch);
        }
        Ok(self.save(id).await?)
    }

    /// Writes a batch as it is now.
    async fn save(&self, id: &str) -> io::Result<Batch> {
        let _one_at_a_time = self.saving.lock().await;
        let batch = self.index.lock().batches.get(id).map(|entry| entry.batch.clone());
        let batch = batch.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the batch is gone"))?;
        self.disk.save(Kind::Batch, id, &batch).await?;
        Ok(batch)
    }

    /// Counts an answer in memory; on disk, the answers themselves are counted.
    fn count(&self, id: &str, good: bool) {
        if let Some(entry) = self.index.lock().batches.get_mut(id) {
            entry.batch.answered(good);
        }
    }

    /// Turns a batch's answers into a file of its owner. Repeating it has no further effect.
    async fn publish(&self, batch: &Batch, journal: &Path, id: &str, filename: String) -> io::Result<()> {
        let bytes = self.disk.adopt(journal, id).await?;
        let file = self.file(id.to_owned(), &batch.sender.owner(), filename, OUTPUT, bytes, batch.output_age_s);
        self.disk.save(Kind::File, id, &file).await?;
        let is_wanted = {
            let mut index = self.index.lock();
            let entry = index.batches.get_mut(&batch.id);
            let is_wanted = entry.is_some();
            if let Some(entry) = entry {
                entry.answers_bytes = entry.answers_bytes.saturating_sub(bytes);
                index.files.insert(id.to_owned(), file);
            }
            is_wanted
        };
        // The batch was erased meanwhile.
        if is_wanted { Ok(()) } else { self.disk.remove_file(id).await }
    }

    /// The files and batches of these owners.
    pub fn of_owners(&self, whose: &Whose) -> (Vec<StoredFile>, Vec<Batch>) {
        let index = self.index.lock();
        let files = index.files.values().filter(|file| whose.covers(&file.owner)).cloned().collect();
        let batches = index.batches.values().map(|entry| &entry.batch).filter(|batch| whose.covers(&batch.sender.owner()));
        (files, batches.cloned().collect())
    }

    /// Removes the files and batches of these owners, also those that run, or counts them. Returns the number of each.
    pub async fn erase(&self, whose: &Whose, erasing: Erasing) -> io::Result<(u64, u64)> {
        // No batch is written after it was removed.
        let _one_at_a_time = self.saving.lock().await;
        let (files, batches) = {
            let mut index = self.index.lock();
            let files = index.files.values().filter(|file| whose.covers(&file.owner)).map(|file| file.id.clone()).collect::<Vec<_>>();
            let of = |entry: &&Entry| whose.covers(&entry.batch.sender.owner());
            let batches = index.batches.values().filter(of).map(|entry| entry.batch.id.clone()).collect::<Vec<_>>();
            if erasing == Erasing::Remove {
                files.iter().for_each(|id| drop(index.files.remove(id)));
                // Its runner finds it gone, and ends.
                let gone = batches.iter().filter_map(|id| index.batches.remove(id));
                gone.collect::<Vec<_>>().iter().for_each(|entry| entry.cancelled.notify_one());
            }
            (files, batches)
        };
        if erasing == Erasing::Remove {
            for id in &batches {
                self.disk.remove_batch(id).await?;
            }
            for id in &files {
                self.disk.remove_file(id).await?;
            }
        }
        Ok((files.len() as u64, batches.len() as u64))
    }

    /// Removes files that are too old, and batches that ended long ago. Returns the number of each.
    pub async fn expire(&self, now: u64) -> io::Result<(u64, u64)> {
        let (files, batches) = {
            let mut index = self.index.lock();
            let old = index.files.values().filter(|file| file.is_old(now) && index.user_of(&file.id).is_none());
            let files: Vec<_> = old.map(|file| file.id.clone()).collect();
            files.iter().for_each(|id| drop(index.files.remove(id)));
            let ended = index.batches.values().filter_map(|entry| Some((entry.batch.ended_at()?, &entry.batch.id)));
            let is_old = |at: u64| self.limits.batches_age.is_some_and(|age| at.saturating_add(age.as_secs()) <= now);
            let batches = ended.filter(|(at, _)| is_old(*at)).map(|(_, id)| id.clone());
            (files, batches.collect::<Vec<_>>())
        };
        for id in &files {
            self.disk.remove_file(id).await?;
        }
        for id in &batches {
            self.forget(id).await?;
        }
        Ok((files.len() as u64, batches.len() as u64))
    }

    async fn forget(&self, id: &str) -> io::Result<()> {
        self.index.lock().batches.remove(id);
        self.disk.remove_batch(id).await
    }

    /// Takes the batches that no runner has taken yet.
    fn take(&self) -> Vec<String> {
        let mut index = self.index.lock();
        let waiting = index.batches.values_mut().filter(|entry| !entry.taken && !entry.batch.is_over());
        waiting
            .map(|entry| {
                entry.taken = true;
                entry.batch.id.clone()
            })
            .collect()
    }
}

impl Index {
    /// The files, those that arrive, and the answers of batches that are not in one yet, of some tenants.
    fn used(&self, is_one: impl Fn(&str) -> bool) -> Used {
        let files = self.files.values().filter(|file| is_one(tenant_of(&file.owner))).map(|file| Used { files: 1, bytes: file.bytes });
        let answers = self.batches.values().filter(|entry| is_one(entry.tenant()));
        let answers = answers.map(|entry| Used { files: 0, bytes: entry.answers_bytes });
        let arriving = self.arriving.values().filter(|(owner, _)| is_one(tenant_of(owner)));
        let arriving = arriving.map(|(_, bytes)| Used { files: 1, bytes: *bytes });
        files
            .chain(answers)
            .chain(arriving)
            .fold(Used::default(), |all, one| Used { files: all.files + one.files, bytes: all.bytes.saturating_add(one.bytes) })
    }

    /// The batch that still reads a file.
    fn user_of(&self, file: &str) -> Option<&str> {
        let mut open = self.batches.values().map(|entry| &entry.batch).filter(|batch| !batch.is_over());
        open.find(|batch| batch.input_file == file).map(|batch| batch.id.as_str())
    }
}

impl Page {
    /// Sorts and cuts `all` to this page. Each item comes with its time and its id.
    fn of<T>(&self, mut all: Vec<(u64, String, T)>) -> Result<Listed<T>, BatchError> {
        all.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        if !self.ascending {
            all.reverse();
        }
        let begin = match &self.after {
            None => 0,
            Some(after) => 1 + all.iter().position(|(_, id, _)| id == after).ok_or_else(|| BatchError::NotFound(after.clone()))?,
        };
        let has_more = all.len() > begin + self.limit;
        Ok(Listed { items: all.into_iter().skip(begin).take(self.limit).map(|(_, _, item)| item).collect(), has_more })
    }
}

/// A file that is being uploaded. If it is dropped, it is not stored.
#[derive(Debug)]
pub struct Arriving<'a> {
    upload: Upload,
    bytes: u64,
    counted: Counted<'a>,
}

/// The part of an upload that counts towards its tenant's room, until this is dropped.
#[derive(Debug)]
struct Counted<'a> {
    batches: &'a Batches,
    id: String,
    owner: String,
    bytes: u64,
}

impl Counted<'_> {
    async fn grow_to(&mut self, bytes: u64) -> Result<(), NoRoom> {
        self.batches.check_room(&self.owner, Used { files: 0, bytes: bytes.saturating_sub(self.bytes) }).await?;
        self.bytes = bytes;
        if let Some((_, counted)) = self.batches.index.lock().arriving.get_mut(&self.id) {
            *counted = bytes;
        }
        Ok(())
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.batches.index.lock().arriving.remove(&self.id);
    }
}

impl Arriving<'_> {
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), BatchError> {
        self.bytes += bytes.len() as u64;
        let bytes_max = self.counted.batches.limits.file_bytes;
        if self.bytes > bytes_max {
            return Err(BatchError::TooLarge(bytes_max));
        }
        // A file counts from its first byte on, and then in steps.
        if self.counted.bytes == 0 || self.bytes >= self.counted.bytes + CHECK_EVERY_BYTES {
            self.counted.grow_to(self.bytes).await?;
        }
        Ok(self.upload.write(bytes).await?)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The problem of a batch whose sender lost access.
fn gone(reason: String) -> Problem {
    Problem::new("invalid_api_key", format!("The rest of this batch was not run: {reason}."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::life::{Counts, Ending, Status};
    use std::os::unix::fs::MetadataExt;

    const HOUR: Option<Duration> = Some(Duration::from_secs(3600));

    fn limits() -> Limits {
        let room = Room { files: 3, bytes: 100 };
        let (total_bytes, reserve_bytes) = (1000, 0);
        Limits {
            file_bytes: 50,
            lines: 10,
            room,
            total_bytes,
            reserve_bytes,
            files_age: HOUR,
            batches_age: HOUR,
            at_once: 2,
            line_bytes: 1000,
        }
    }

    async fn stored(batches: &Batches, owner: &str, content: &str) -> Result<StoredFile, BatchError> {
        let mut arriving = batches.upload(owner).await?;
        arriving.write(content.as_bytes()).await?;
        batches.keep(arriving, owner, "requests.jsonl".into(), None).await
    }

    fn sender(tenant: &str) -> Sender {
        Sender { tenant: Some(tenant.into()), ..Sender::default() }
    }

    fn wanted(file: &StoredFile) -> NewBatch {
        NewBatch { endpoint: "/v1/embeddings".into(), input_file: file.id.clone(), ..NewBatch::default() }
    }

    #[tokio::test]
    async fn files_and_batches_outlive_the_process_and_belong_to_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        let batch = batches.create(sender("acme"), wanted(&file)).await.unwrap();
        assert!(matches!(batches.create(sender("other"), wanted(&file)).await, Err(BatchError::NotFound(_))));
        drop(batches);
        let batches = Batches::open(dir.path(), limits()).unwrap();
        assert_eq!(batches.stored_file("acme", &file.id).unwrap(), file);
        assert_eq!(std::fs::read_to_string(batches.content(&file)).unwrap(), "hello\n");
        assert_eq!(batches.batch("acme", &batch.id).unwrap(), batch);
        for missing in [batches.batch("other", &batch.id).map(drop), batches.stored_file("other", &file.id).map(drop)] {
            assert!(matches!(missing, Err(BatchError::NotFound(_))));
        }
        assert!(matches!(batches.delete_file("other", &file.id).await, Err(BatchError::NotFound(_))));
        assert!(matches!(batches.cancel("other", &batch.id).await, Err(BatchError::NotFound(_))));
        assert_eq!(batches.list("other", &Page { limit: 9, ..Page::default() }).unwrap().items, []);
    }

    #[tokio::test]
    async fn a_file_that_a_batch_reads_stays() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        let batch = batches.create(sender("acme"), wanted(&file)).await.unwrap();
        assert!(matches!(batches.delete_file("acme", &file.id).await, Err(BatchError::InUse { .. })));
        batches.change(&batch.id, |batch| batch.refuse(1, vec![])).await.unwrap();
        batches.delete_file("acme", &file.id).await.unwrap();
        assert!(!batches.content(&file).exists());
    }

    #[tokio::test]
    async fn there_is_so_much_room_and_what_does_not_fit_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        assert!(matches!(stored(&batches, "acme", &"x".repeat(51)).await, Err(BatchError::TooLarge(50))));
        stored(&batches, "acme", &"x".repeat(50)).await.unwrap();
        stored(&batches, "acme", &"x".repeat(50)).await.unwrap();
        assert!(matches!(stored(&batches, "acme", "x").await, Err(BatchError::NoRoom(NoRoom::Bytes { .. }))));
        stored(&batches, "other", "x").await.unwrap();
        let full = Batches::open(dir.path(), Limits { total_bytes: 110, ..limits() }).unwrap();
        stored(&full, "third", &"x".repeat(9)).await.unwrap();
        assert!(matches!(stored(&full, "fourth", "x").await, Err(BatchError::NoRoom(NoRoom::Total { bytes: 111, max: 110 }))));
        let mut early = full.upload("fifth").await.unwrap();
        assert!(matches!(early.write(b"x").await, Err(BatchError::NoRoom(NoRoom::Total { .. }))), "it is refused before it has arrived");
        let used = || full.index.lock().used(|tenant| tenant == "fifth");
        assert_eq!(used(), Used { files: 1, bytes: 0 });
        drop(early);
        assert_eq!(used(), Used::default());
        let no_disk = Batches::open(dir.path(), Limits { reserve_bytes: u64::MAX, ..limits() }).unwrap();
        assert!(matches!(stored(&no_disk, "other", "x").await, Err(BatchError::NoRoom(NoRoom::Disk { .. }))));
        let uploads = std::fs::read_dir(dir.path().join("uploads")).unwrap().count();
        assert_eq!(uploads, 0, "what did not fit is gone");
    }

    #[tokio::test]
    async fn answers_take_room_before_they_are_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let file = stored(&batches, "acme", &"x".repeat(40)).await.unwrap();
        let batch = batches.create(sender("acme"), wanted(&file)).await.unwrap();
        batches.note_answers(&batch.id, 59);
        assert_eq!(batches.check_answers("acme").await, Ok(()));
        assert!(matches!(stored(&batches, "acme", "xx").await, Err(BatchError::NoRoom(NoRoom::Bytes { bytes: 101, max: 100 }))));
        batches.note_answers(&batch.id, 60);
        assert_eq!(batches.check_answers("acme").await, Err(NoRoom::Bytes { bytes: 101, max: 100 }));
        assert_eq!(batches.check_answers("other").await, Ok(()));
        let journal = batches.disk.journal(&batch.id, true);
        std::fs::create_dir_all(journal.parent().unwrap()).unwrap();
        std::fs::write(&journal, "y".repeat(60)).unwrap();
        batches.publish(&batch, &journal, "file-out", "out.jsonl".into()).await.unwrap();
        assert_eq!(batches.check_answers("acme").await, Err(NoRoom::Bytes { bytes: 101, max: 100 }), "they count once");
    }

    #[tokio::test]
    async fn pages_are_the_latest_first() {
        let all: Vec<_> = (0..5_u64).map(|n| (n / 2, n.to_string(), n)).collect();
        let page = |after: Option<&str>, limit, ascending| Page { after: after.map(str::to_owned), limit, ascending }.of(all.clone());
        assert_eq!(page(None, 2, false).unwrap(), Listed { items: vec![4, 3], has_more: true });
        assert_eq!(page(Some("3"), 3, false).unwrap(), Listed { items: vec![2, 1, 0], has_more: false });
        assert_eq!(page(Some("3"), 3, true).unwrap(), Listed { items: vec![4], has_more: false });
        assert!(page(Some("9"), 3, true).is_err());
    }

    #[tokio::test]
    async fn answers_become_a_file_once_whenever_the_process_dies() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        let id = batches.create(sender("acme"), wanted(&file)).await.unwrap().id;
        batches.change(&id, |batch| batch.accept(1, Counts { total: 1, completed: 1, failed: 0 })).await.unwrap();
        let journal = batches.disk.journal(&id, true);
        std::fs::write(&journal, "answer\n").unwrap();
        let batch = batches.change(&id, |batch| batch.finalize(2, Ending::Completed, Some("file-out".into()), None)).await.unwrap();
        for _ in 0..2 {
            // On the second run, the journal has already become the file, and only the file's record is missing.
            batches.publish(&batch, &journal, "file-out", "out.jsonl".into()).await.unwrap();
            std::fs::remove_file(dir.path().join("files/file-out.json")).unwrap();
            let again = Batches::open(dir.path(), limits()).unwrap();
            assert!(again.disk.content("file-out").exists(), "a batch that finishes has named it");
        }
        batches.publish(&batch, &journal, "file-out", "out.jsonl".into()).await.unwrap();
        batches.change(&id, |batch| batch.close(3)).await.unwrap();
        let again = Batches::open(dir.path(), limits()).unwrap();
        let out = again.stored_file("acme", "file-out").unwrap();
        assert_eq!((out.bytes, out.purpose.as_str()), (7, OUTPUT));
        assert_eq!(again.batch("acme", &id).unwrap().status, Status::Completed);
    }

    #[tokio::test]
    async fn a_users_batch_is_the_users_and_a_tenants_users_share_its_room() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let of = |user: Option<&str>| Sender { user: user.map(str::to_owned), ..sender("acme") };
        let anns = stored(&batches, "acme/ann", "hello\n").await.unwrap();
        let tenants = stored(&batches, "acme", "hello\n").await.unwrap();
        for (user, file) in [(None, &anns), (Some("bob"), &anns), (Some("ann"), &tenants)] {
            assert!(matches!(batches.create(of(user), wanted(file)).await, Err(BatchError::NotFound(_))), "{user:?}");
        }
        let batch = batches.create(of(Some("ann")), wanted(&anns)).await.unwrap();
        let page = Page { limit: 9, ..Page::default() };
        for (owner, listed) in [("acme/ann", 1), ("acme/bob", 0), ("acme", 0)] {
            assert_eq!(batches.batch(owner, &batch.id).is_ok(), listed == 1, "{owner}");
            assert_eq!(batches.list(owner, &page).unwrap().items.len(), listed, "{owner}");
        }
        let journal = batches.disk.journal(&batch.id, true);
        std::fs::write(&journal, "answer\n").unwrap();
        batches.publish(&batch, &journal, "file-out", "out.jsonl".into()).await.unwrap();
        assert!(batches.stored_file("acme/ann", "file-out").is_ok() && batches.stored_file("acme", "file-out").is_err());
        let full = stored(&batches, "acme/bob", "hello\n").await;
        assert!(matches!(full, Err(BatchError::NoRoom(NoRoom::Files(3)))), "a user more is no room more: {full:?}");
        assert!(stored(&batches, "acme2", "hello\n").await.is_ok());
    }

    #[tokio::test]
    async fn files_and_answers_are_for_their_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(&dir.path().join("new/batches"), limits()).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        let id = batches.create(sender("acme"), wanted(&file)).await.unwrap().id;
        let arriving = batches.upload("acme").await.unwrap();
        let mut answers = journal::Journal::open(&batches.disk, &id).await.unwrap();
        answers.append(true, "a", "answer\n").await.unwrap();
        let (mut folders, mut seen) = (vec![dir.path().join("new")], 0);
        while let Some(folder) = folders.pop() {
            assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700, "{}", folder.display());
            for entry in folder.read_dir().unwrap().map(Result::unwrap) {
                if entry.file_type().unwrap().is_dir() {
                    folders.push(entry.path());
                } else {
                    assert_eq!(entry.metadata().unwrap().mode() & 0o777, 0o600, "{}", entry.path().display());
                    seen += 1;
                }
            }
        }
        assert_eq!(seen, 6, "two records, a content, an upload, and two kinds of answers");
        drop(arriving);
    }

    #[tokio::test]
    async fn what_is_old_goes() {
        let dir = tempfile::tempdir().unwrap();
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        let id = batches.create(sender("acme"), wanted(&file)).await.unwrap().id;
        let stored_at = file.created_ms / 1000;
        assert_eq!(batches.expire(stored_at + 3600).await.unwrap(), (0, 0));
        assert!(batches.content(&file).exists(), "a batch reads it");
        batches.change(&id, |batch| batch.refuse(stored_at + 10, vec![])).await.unwrap();
        assert_eq!(batches.expire(stored_at + 3599).await.unwrap(), (0, 0), "nothing is old");
        assert_eq!(batches.expire(stored_at + 3600).await.unwrap(), (1, 0));
        assert!(!batches.content(&file).exists());
        assert!(batches.batch("acme", &id).is_ok(), "its age begins at its end");
        assert_eq!(batches.expire(stored_at + 3610).await.unwrap(), (0, 1));
        assert!(batches.batch("acme", &id).is_err());
        assert_eq!(Batches::open(dir.path(), limits()).unwrap().list("acme", &Page { limit: 9, ..Page::default() }).unwrap().items, []);
    }

    #[tokio::test]
    async fn what_is_kept_has_no_end_until_a_limit_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Limits { files_age: None, batches_age: None, ..limits() };
        let batches = Batches::open(dir.path(), kept).unwrap();
        let file = stored(&batches, "acme", "hello\n").await.unwrap();
        assert_eq!((file.expires_at, batches.expire(u64::MAX).await.unwrap()), (None, (0, 0)));
        drop(batches);
        let batches = Batches::open(dir.path(), limits()).unwrap();
        let stored_at = file.created_ms / 1000;
        assert_eq!(batches.stored_file("acme", &file.id).unwrap().expires_at, Some(stored_at + 3600));
        assert_eq!(batches.expire(stored_at + 3600).await.unwrap(), (1, 0));
    }
}
