//! Bytes in transit: transfers share links fairly.
//!
//! A flow's rate is the least of its equal shares of the links that it passes. (Max-min fairness would give the rest of such a share to
//! other flows; this is a little pessimistic, and only needs the flows that share a link with one that starts or ends.)

use std::{collections::BTreeSet, time::Duration};

/// One direction of a network card, or of a host's memory bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkIndex(pub usize);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FlowIndex(usize);

/// The time at which a flow ends if nothing changes. A later deadline of the same flow replaces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadline {
    pub flow: FlowIndex,
    /// The number of this deadline among the flow's.
    pub version: u32,
    pub at: Duration,
}

#[derive(Debug)]
pub struct Flows<T> {
    links: Vec<Link>,
    flows: Vec<Option<Flow<T>>>,
    free: Vec<usize>,
    /// The versions by place. They are never reset, so that a deadline of an earlier flow is not mistaken for one of the next flow.
    versions: Vec<u32>,
}

#[derive(Debug)]
struct Link {
    bytes_per_s: f64,
    flows: BTreeSet<FlowIndex>,
    bytes: f64,
}

#[derive(Debug)]
struct Flow<T> {
    links: Vec<LinkIndex>,
    left: f64,
    bytes_per_s: f64,
    since: Duration,
    payload: T,
}

impl<T> Default for Flows<T> {
    fn default() -> Self {
        Self { links: Vec::new(), flows: Vec::new(), free: Vec::new(), versions: Vec::new() }
    }
}

impl<T> Flows<T> {
    pub fn add_link(&mut self, bytes_per_s: f64) -> LinkIndex {
        self.links.push(Link { bytes_per_s, flows: BTreeSet::new(), bytes: 0.0 });
        LinkIndex(self.links.len() - 1)
    }

    /// Starts a transfer over `links`. Returns the deadlines that change.
    pub fn start(&mut self, now: Duration, links: Vec<LinkIndex>, bytes: u64, payload: T) -> Vec<Deadline> {
        let flow = Flow { left: bytes as f64, bytes_per_s: 0.0, since: now, payload, links };
        let index = match self.free.pop() {
            Some(place) => {
                self.flows[place] = Some(flow);
                FlowIndex(place)
            }
            None => {
                self.flows.push(Some(flow));
                self.versions.push(0);
                FlowIndex(self.flows.len() - 1)
            }
        };
        let links = self.flow(index).links.clone();
        for link in &links {
            let link = &mut self.links[link.0];
            link.flows.insert(index);
            link.bytes += bytes as f64;
        }
        self.share(now, &links)
    }

    /// Applies a deadline. If it still holds, the flow has ended: returns its payload, and the deadlines that change.
    pub fn end(&mut self, now: Duration, deadline: Deadline) -> Option<(T, Vec<Deadline>)> {
        let FlowIndex(place) = deadline.flow;
        if self.versions[place] != deadline.version {
            return None;
        }
        let flow = self.flows[place].take()?;
        self.versions[place] += 1;
        self.free.push(place);
        for link in &flow.links {
            self.links[link.0].flows.remove(&deadline.flow);
        }
        let changed = self.share(now, &flow.links);
        Some((flow.payload, changed))
    }

    /// The number of bytes that were ever assigned to a link.
    pub fn bytes(&self, link: LinkIndex) -> f64 {
        self.links[link.0].bytes
    }

    pub fn is_idle(&self) -> bool {
        self.flows.iter().all(Option::is_none)
    }

    /// Recomputes the rates of all flows over these links.
    fn share(&mut self, now: Duration, links: &[LinkIndex]) -> Vec<Deadline> {
        let touched: BTreeSet<FlowIndex> = links.iter().flat_map(|link| self.links[link.0].flows.iter().copied()).collect();
        let mut changed = Vec::new();
        for index in touched {
            let rate = |link: &LinkIndex| self.links[link.0].bytes_per_s / self.links[link.0].flows.len() as f64;
            let rate = self.flow(index).links.iter().map(rate).fold(f64::INFINITY, f64::min);
            let flow = self.flows[index.0].as_mut().expect("a link lists live flows");
            if flow.bytes_per_s == rate {
                continue;
            }
            flow.left = (flow.left - flow.bytes_per_s * (now - flow.since).as_secs_f64()).max(0.0);
            (flow.since, flow.bytes_per_s) = (now, rate);
            self.versions[index.0] += 1;
            let at = now + Duration::from_secs_f64(flow.left / rate);
            changed.push(Deadline { flow: index, version: self.versions[index.0], at });
        }
        changed
    }

    fn flow(&self, index: FlowIndex) -> &Flow<T> {
        self.flows[index.0].as_ref().expect("a link lists live flows")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Queue;

    /// Runs flows of (start ms, links, bytes) over links of 1,000 bytes/s each, and returns the end of each in ms.
    fn ends(flows: &[(u64, &[usize], u64)]) -> Vec<u128> {
        let mut net = Flows::default();
        let links: Vec<_> = (0..4).map(|_| net.add_link(1000.0)).collect();
        let mut queue = Queue::default();
        for (n, &(at, ..)) in flows.iter().enumerate() {
            queue.push(Duration::from_millis(at), Err(n));
        }
        let mut ends = vec![0; flows.len()];
        while let Some((now, event)) = queue.pop() {
            let changed = match event {
                Err(n) => net.start(now, flows[n].1.iter().map(|&link| links[link]).collect(), flows[n].2, n),
                Ok(deadline) => match net.end(now, deadline) {
                    Some((n, changed)) => {
                        ends[n] = now.as_millis();
                        changed
                    }
                    None => continue,
                },
            };
            changed.into_iter().for_each(|deadline| queue.push(deadline.at, Ok(deadline)));
        }
        assert!(net.is_idle());
        ends
    }

    #[test]
    fn a_link_is_shared_while_two_use_it() {
        assert_eq!(ends(&[(0, &[0], 1000)]), [1000]);
        assert_eq!(ends(&[(0, &[0], 1000), (0, &[0], 1000)]), [2000, 2000]);
        assert_eq!(ends(&[(0, &[0], 1000), (500, &[0], 250)]), [1250, 1000], "half the rate for half a second");
    }

    #[test]
    fn the_narrowest_link_counts() {
        assert_eq!(ends(&[(0, &[0, 1], 1000), (0, &[1, 2], 1000), (0, &[3], 1000)]), [2000, 2000, 1000]);
    }
}
