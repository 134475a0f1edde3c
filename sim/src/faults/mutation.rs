//! Bugs to plant. Each alters or drops data between a simulated shell and its core, so that production code has no switches for it.

use std::{fmt, str::FromStr};

macro_rules! mutations {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal,)*) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Mutation {
            $($(#[doc = $doc])* $name,)*
        }

        impl Mutation {
            pub const ALL: &'static [Mutation] = &[$(Mutation::$name,)*];

            pub const fn name(self) -> &'static str {
                match self {
                    $(Mutation::$name => $text,)*
                }
            }
        }
    };
}

mutations! {
    /// A reader uses blocks whose checksum is wrong.
    SkipChecksum = "skip-checksum",
    /// A block is found before it is written.
    PublishEarly = "publish-early",
    /// A put is acknowledged before its blocks are published.
    AckBeforePublish = "ack-before-publish",
    /// A sequence that a worker returns is not queued again.
    ForgetRequeue = "forget-requeue",
    /// A restarted coordinator assigns the epochs of its earlier life again.
    ReuseEpoch = "reuse-epoch",
    /// A reader never returns its leases.
    DropLease = "drop-lease",
    /// A coordinator accepts a worker's messages under an old epoch.
    ObeyStaleEpoch = "obey-stale-epoch",
    /// A worker is not notified of a cancelled sequence, and keeps its blocks.
    ForgetCancel = "forget-cancel",
    /// A sequence continues one token too early at its next worker.
    ResumeEarly = "resume-early",
    /// A worker is not notified that its missing blocks are no longer being computed.
    ForgetStopWaiting = "forget-stop-waiting",
    /// A request's deadline is lost.
    LoseDeadline = "lose-deadline",
    /// A pool node keeps the resources of a client whose connection has ended.
    ForgetClientGone = "forget-client-gone",
    /// A worker keeps the work of a coordinator whose link is down.
    ForgetLinkDown = "forget-link-down",
    /// A put that breaks off is never answered.
    ForgetPutDone = "forget-put-done",
    /// Blocks of a node that is gone are neither present nor missing.
    ForgetUnreachable = "forget-unreachable",
    /// A pool node writes another layout's block beside its slot.
    StrayBlock = "stray-block",
    /// A pool node ends the leases of one layout's readers when another layout needs memory.
    TakeLeased = "take-leased",
    /// A pool node takes memory from a layout with clients as if it had none.
    UndercutFloor = "undercut-floor",
    /// A head publishes a block as soon as one stage's part is there.
    PublishHalfBlock = "publish-half-block",
    /// A head goes on with a stage that was started again, instead of ending the group.
    RejoinStage = "rejoin-stage",
    /// A stage does for a new head what an earlier one has asked for.
    AnswerOldHead = "answer-old-head",
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no mutation {0:?}")]
pub struct UnknownMutation(String);

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mutation {
    type Err = UnknownMutation;

    fn from_str(name: &str) -> Result<Self, UnknownMutation> {
        Self::ALL.iter().copied().find(|mutation| mutation.name() == name).ok_or_else(|| UnknownMutation(name.to_owned()))
    }
}
