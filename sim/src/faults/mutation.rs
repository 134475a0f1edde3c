//! Bugs to plant. Each alters or drops data between a simulated shell and its core, so that production code has no switches for it.

use std::{fmt, str::FromStr};

macro_rules! mutations {
    ($($(#[doc = $doc:literal])* $name:ident, $test:ident = $text:literal, seed $seed:literal: $rule:literal;)*) => {
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

            /// A seed that finds it, and part of the message of the rule that is then broken.
            pub const fn found_by(self) -> (u64, &'static str) {
                match self {
                    $(Mutation::$name => ($seed, $rule),)*
                }
            }
        }

        #[cfg(test)]
        mod planted_bugs_are_found {
            $(
                #[test]
                fn $test() {
                    crate::faults::tests::is_found(super::Mutation::$name);
                }
            )*
        }
    };
}

// The seeds, and what they say, are those that `make sim-mutations` prints.
mutations! {
    /// A reader uses blocks whose checksum is wrong.
    SkipChecksum, skip_checksum = "skip-checksum", seed 51: "takes wrong bytes for block";
    /// A block is found before it is written.
    PublishEarly, publish_early = "publish-early", seed 0: "takes wrong bytes for block";
    /// A put is acknowledged before its blocks are published.
    AckBeforePublish, ack_before_publish = "ack-before-publish", seed 0: "a put is acknowledged";
    /// A sequence that a worker returns is not queued again.
    ForgetRequeue, forget_requeue = "forget-requeue", seed 12: "has not ended";
    /// A restarted coordinator assigns the epochs of its earlier life again.
    ReuseEpoch, reuse_epoch = "reuse-epoch", seed 0: "is given out twice";
    /// A reader never returns its leases.
    DropLease, drop_lease = "drop-lease", seed 0: "something is left: pool-";
    /// A coordinator accepts a worker's messages under an old epoch.
    ObeyStaleEpoch, obey_stale_epoch = "obey-stale-epoch", seed 1: "takes what is said under an epoch that is gone";
    /// A worker is not notified of a cancelled sequence, and keeps its blocks.
    ForgetCancel, forget_cancel = "forget-cancel", seed 0: "something is left: worker-";
    /// A sequence continues one token too early at its next worker.
    ResumeEarly, resume_early = "resume-early", seed 0: "of choice 0, not";
    /// A worker is not notified that its missing blocks are no longer being computed.
    ForgetStopWaiting, forget_stop_waiting = "forget-stop-waiting", seed 0: "ends so: Open";
    /// A request's deadline is lost.
    LoseDeadline, lose_deadline = "lose-deadline", seed 2: "lives longer than";
    /// A pool node keeps the resources of a client whose connection has ended.
    ForgetClientGone, forget_client_gone = "forget-client-gone", seed 5: "it holds something for a client that is gone";
    /// A worker keeps the work of a coordinator whose link is down.
    ForgetLinkDown, forget_link_down = "forget-link-down", seed 1: "and no coordinator";
    /// A put that breaks off is never answered.
    ForgetPutDone, forget_put_done = "forget-put-done", seed 45: "has not ended";
    /// Blocks of a node that is gone are neither present nor missing.
    ForgetUnreachable, forget_unreachable = "forget-unreachable", seed 23: "has not ended";
    /// A pool node writes another layout's block beside its slot.
    StrayBlock, stray_block = "stray-block", seed 1: "another layout's block is in slot";
    /// A pool node ends the leases of one layout's readers when another layout needs memory.
    TakeLeased, take_leased = "take-leased", seed 7: "is another layout's, while a reader has a lease on it";
    /// A pool node takes memory from a layout with clients as if it had none.
    UndercutFloor, undercut_floor = "undercut-floor", seed 1: "below its floor of";
    /// A head publishes a block as soon as one stage's part is there.
    PublishHalfBlock, publish_half_block = "publish-half-block", seed 5: "puts wrong bytes for block";
    /// A head goes on with a stage that was started again, instead of ending the group.
    RejoinStage, rejoin_stage = "rejoin-stage", seed 5: "puts wrong bytes for block";
    /// A stage does for a new head what an earlier one has asked for.
    AnswerOldHead, answer_old_head = "answer-old-head", seed 32: "of choice 0, not";
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
