//! Statements to instructions. Every immediate and every special register gets a slot of its own, so that the interpreter only deals with
//! slots.

use super::{
    parse::{Entry, Item, Loc, Module, parse, shared_variable, size_of_type},
    program::*,
};
use crate::fault::{Fault, Kind};
use std::{collections::HashMap, sync::Mutex};

/// All kernels of a module.
pub(crate) fn decode(text: &str) -> Result<Vec<Kernel>, Fault> {
    let module = parse(text)?;
    module.entries.iter().map(|entry| Decoder::new(&module, entry)?.kernel(entry)).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    R32,
    R64,
    Predicate,
}

struct Decoder {
    /// Named registers, innermost scope last; numbered ones by prefix.
    scopes: Vec<HashMap<String, (Class, u16)>>,
    numbered: HashMap<String, (Class, u16)>,
    slots: [usize; 3],
    constants32: HashMap<u32, u16>,
    constants64: HashMap<u64, u16>,
    constant_predicates: HashMap<bool, u16>,
    specials: HashMap<Special, u16>,
    /// Addresses of shared variables, and offsets of parameters.
    symbols: HashMap<String, u64>,
    labels: HashMap<String, usize>,
    /// Instructions whose targets are yet to be filled in.
    branches: Vec<(usize, String)>,
    code: Vec<Instr>,
    lists: Vec<u16>,
    places: Vec<Loc>,
    shared: Vec<(u32, u32)>,
    dynamic_at: u32,
    params: Vec<(usize, usize)>,
    param_bytes: usize,
}

/// The operands after an instruction's name.
struct Operands {
    all: Vec<String>,
    name: String,
}

impl Operands {
    fn get(&self, i: usize) -> Result<&str, Fault> {
        self.all.get(i).map(String::as_str).ok_or_else(|| unsupported(&format!("{} with {} operands", self.name, self.all.len())))
    }
}

fn unsupported(what: &str) -> Fault {
    Fault::new(Kind::Unsupported, format!("the stand-in does not know the PTX `{what}`; teach it in gpu-standin/src/ptx/decode.rs"))
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth, mut open) = (Vec::new(), 0, String::new());
    for c in text.chars() {
        depth += i32::from(c == '{' || c == '[') - i32::from(c == '}' || c == ']');
        if c == ',' && depth == 0 {
            parts.push(open.trim().to_owned());
            open.clear();
        } else {
            open.push(c);
        }
    }
    if !open.trim().is_empty() {
        parts.push(open.trim().to_owned());
    }
    parts
}

impl Decoder {
    fn new(module: &Module, entry: &Entry) -> Result<Self, Fault> {
        let mut decoder = Self {
            scopes: vec![HashMap::new()],
            numbered: HashMap::new(),
            slots: [0; 3],
            constants32: HashMap::new(),
            constants64: HashMap::new(),
            constant_predicates: HashMap::new(),
            specials: HashMap::new(),
            symbols: HashMap::new(),
            labels: HashMap::new(),
            branches: Vec::new(),
            code: Vec::new(),
            lists: Vec::new(),
            places: Vec::new(),
            shared: Vec::new(),
            dynamic_at: SHARED_START,
            params: Vec::new(),
            param_bytes: 0,
        };
        for (name, size, alignment) in &entry.params {
            let offset = decoder.param_bytes.next_multiple_of(*alignment);
            decoder.symbols.insert(name.clone(), offset as u64);
            decoder.params.push((offset, *size));
            decoder.param_bytes = offset + size;
        }
        let mut variables = module.shared.clone();
        for item in &entry.body {
            if let Item::Statement(text, _) = item
                && let Some(declaration) = text.strip_prefix(".shared")
            {
                variables.push(shared_variable(declaration)?);
            }
        }
        // The dynamic part comes last.
        variables.sort_by_key(|(_, size, _)| size.is_none());
        for (name, size, alignment) in variables {
            let start = decoder.dynamic_at.next_multiple_of(alignment as u32);
            decoder.symbols.insert(name, u64::from(start));
            if let Some(size) = size {
                decoder.shared.push((start, start + size as u32));
                // The address is not a multiple of more than the requested alignment.
                decoder.dynamic_at = (start + size as u32 + SHARED_GAP).next_multiple_of(32) + 16;
            } else {
                decoder.dynamic_at = start;
            }
        }
        Ok(decoder)
    }

    fn kernel(mut self, entry: &Entry) -> Result<Kernel, Fault> {
        for item in &entry.body {
            match item {
                Item::Label(name) => {
                    self.labels.insert(name.clone(), self.code.len());
                }
                Item::Open => self.scopes.push(HashMap::new()),
                Item::Close => {
                    self.scopes.pop();
                }
                Item::Statement(text, loc) => {
                    self.statement(text, loc).map_err(|fault| fault.at(format!("kernel {}, {loc}", entry.name)))?;
                }
            }
        }
        let mut leaders = vec![false; self.code.len() + 1];
        for (at, label) in std::mem::take(&mut self.branches) {
            let target = *self.labels.get(&label).ok_or_else(|| unsupported(&format!("a branch to {label}")))?;
            self.code[at].imm = target as i64;
            leaders[target] = true;
            leaders[at + 1] = true;
        }
        Ok(Kernel {
            name: entry.name.clone(),
            code: self.code,
            lists: self.lists,
            leaders,
            places: self.places,
            params: self.params,
            param_bytes: self.param_bytes,
            slots: self.slots,
            constants32: self.constants32.into_iter().map(|(value, slot)| (slot, value)).collect(),
            constants64: self.constants64.into_iter().map(|(value, slot)| (slot, value)).collect(),
            constant_predicates: self.constant_predicates.into_iter().map(|(value, slot)| (slot, value)).collect(),
            specials: self.specials.into_iter().map(|(special, slot)| (slot, special)).collect(),
            shared: self.shared,
            dynamic_at: self.dynamic_at,
            threads_max: entry.threads_max,
            spare: Mutex::default(),
        })
    }

    fn new_slots(&mut self, class: Class, count: usize) -> Result<u16, Fault> {
        let next = &mut self.slots[class as usize];
        let first = u16::try_from(*next).ok().filter(|_| *next + count < usize::from(NO_GUARD));
        *next += count;
        first.ok_or_else(|| unsupported("a kernel with 65,535 registers"))
    }

    fn declare(&mut self, text: &str) -> Result<(), Fault> {
        let (kind, names) = text.trim().split_once(char::is_whitespace).ok_or_else(|| unsupported(text))?;
        let class = match kind {
            ".pred" => Class::Predicate,
            _ if size_of_type(&kind[1..])? == 8 => Class::R64,
            _ => Class::R32,
        };
        for name in names.split(',').map(str::trim) {
            if let Some((prefix, count)) = name.split_once('<') {
                let count: usize = count.trim_end_matches('>').parse().map_err(|_| unsupported(text))?;
                let first = self.new_slots(class, count)?;
                self.numbered.insert(prefix.to_owned(), (class, first));
            } else {
                let slot = self.new_slots(class, 1)?;
                self.scopes.last_mut().expect("the kernel's scope").insert(name.to_owned(), (class, slot));
            }
        }
        Ok(())
    }

    fn register(&self, name: &str) -> Option<(Class, u16)> {
        if let Some(found) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Some(*found);
        }
        let digits = name.find(|c: char| c.is_ascii_digit())?;
        let (class, first) = *self.numbered.get(&name[..digits])?;
        Some((class, first + name[digits..].parse::<u16>().ok()?))
    }

    fn constant(&mut self, class: Class, value: u64) -> Result<u16, Fault> {
        match class {
            Class::R32 => {
                if let Some(slot) = self.constants32.get(&(value as u32)) {
                    return Ok(*slot);
                }
                let slot = self.new_slots(class, 1)?;
                self.constants32.insert(value as u32, slot);
                Ok(slot)
            }
            Class::R64 => {
                if let Some(slot) = self.constants64.get(&value) {
                    return Ok(*slot);
                }
                let slot = self.new_slots(class, 1)?;
                self.constants64.insert(value, slot);
                Ok(slot)
            }
            Class::Predicate => {
                if let Some(slot) = self.constant_predicates.get(&(value != 0)) {
                    return Ok(*slot);
                }
                let slot = self.new_slots(class, 1)?;
                self.constant_predicates.insert(value != 0, slot);
                Ok(slot)
            }
        }
    }

    /// The slot of an operand that is read.
    fn operand(&mut self, text: &str, class: Class) -> Result<u16, Fault> {
        if let Some((found, slot)) = self.register(text) {
            return if found == class { Ok(slot) } else { Err(unsupported(&format!("the operand {text}, of another size"))) };
        }
        if let Some(special) = special(text) {
            if class != Class::R32 {
                return Err(unsupported(&format!("{text} as 64 bits")));
            }
            if let Some(slot) = self.specials.get(&special) {
                return Ok(*slot);
            }
            let slot = self.new_slots(class, 1)?;
            self.specials.insert(special, slot);
            return Ok(slot);
        }
        if let Some(value) = self.symbols.get(text).copied() {
            return self.constant(class, value);
        }
        let value = immediate(text).ok_or_else(|| unsupported(&format!("the operand {text}")))?;
        self.constant(class, value)
    }

    /// The registers of a vector, or a single one, with their class.
    fn registers(&self, text: &str) -> Result<(Class, Vec<u16>), Fault> {
        let inner = text.trim().trim_start_matches('{').trim_end_matches('}');
        let found: Vec<(Class, u16)> = inner
            .split(',')
            .map(|name| self.register(name.trim()).ok_or_else(|| unsupported(&format!("the register {name}"))))
            .collect::<Result<_, _>>()?;
        let class = found.first().ok_or_else(|| unsupported("an empty vector"))?.0;
        Ok((class, found.into_iter().map(|(_, slot)| slot).collect()))
    }

    /// A vector that is read, which may contain immediates.
    fn sources(&mut self, text: &str) -> Result<(Class, Vec<u16>), Fault> {
        let names = split(text.trim().trim_start_matches('{').trim_end_matches('}'));
        let class = names.iter().find_map(|name| self.register(name)).map_or(Class::R32, |(class, _)| class);
        let slots = names.iter().map(|name| self.operand(name, class)).collect::<Result<_, _>>()?;
        Ok((class, slots))
    }

    /// The slot and class of the address in `[register+offset]` or `[symbol+offset]`, and the offset.
    fn address(&mut self, text: &str) -> Result<(Class, u16, i64), Fault> {
        let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).ok_or_else(|| unsupported(&format!("the address {text}")))?;
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let offset: i64 = offset.trim().parse().map_err(|_| unsupported(&format!("the address {text}")))?;
        let base = base.trim();
        if let Some((class, slot)) = self.register(base) {
            return Ok((class, slot, offset));
        }
        let value = *self.symbols.get(base).ok_or_else(|| unsupported(&format!("the variable {base}")))?;
        Ok((Class::R64, self.constant(Class::R64, value)?, offset))
    }

    fn push_list(&mut self, slots: &[u16]) -> (u32, u16) {
        let at = self.lists.len() as u32;
        self.lists.extend_from_slice(slots);
        (at, slots.len() as u16)
    }

    fn statement(&mut self, text: &str, loc: &Loc) -> Result<(), Fault> {
        if let Some(declared) = text.strip_prefix(".reg") {
            return self.declare(declared);
        }
        if text.starts_with(".shared") || text.starts_with(".pragma") {
            return Ok(());
        }
        let (mut guard, mut negated, mut rest) = (NO_GUARD, false, text);
        if let Some(guarded) = text.strip_prefix('@') {
            let (name, after) = guarded.split_once(' ').ok_or_else(|| unsupported(text))?;
            negated = name.starts_with('!');
            guard = self.operand(name.trim_start_matches('!'), Class::Predicate)?;
            rest = after.trim();
        }
        let (name, operands) = rest.split_once(' ').unwrap_or((rest, ""));
        let operands = Operands { all: split(operands), name: rest.to_owned() };
        if self.places.last() != Some(loc) {
            self.places.push(loc.clone());
        }
        let place = self.places.len() as u32 - 1;
        let mut instr = Instr { op: Op::Ret, guard, negated, d: 0, a: 0, b: 0, c: 0, imm: 0, list: 0, count: 0, place };
        if let Some((op, shape)) = plain(name) {
            instr.op = op;
            self.plain(&mut instr, shape, &operands)?;
        } else {
            self.other(&mut instr, name, &operands)?;
        }
        self.code.push(instr);
        Ok(())
    }

    fn plain(&mut self, instr: &mut Instr, shape: &str, operands: &Operands) -> Result<(), Fault> {
        // There is one letter per operand, the result's first.
        let classes: Vec<Class> = shape
            .chars()
            .map(|c| {
                if c == 'r' {
                    Class::R32
                } else if c == 'l' {
                    Class::R64
                } else {
                    Class::Predicate
                }
            })
            .collect();
        if classes.len() != operands.all.len() {
            return Err(unsupported(&operands.name));
        }
        let mut slots = Vec::new();
        for (text, class) in operands.all.iter().zip(&classes) {
            slots.push(self.operand(text, *class)?);
        }
        (instr.d, instr.a) = (slots[0], slots[1]);
        instr.b = slots.get(2).copied().unwrap_or(0);
        instr.c = slots.get(3).copied().unwrap_or(0);
        if slots.len() > 4 {
            (instr.list, instr.count) = self.push_list(&slots[4..]);
        }
        Ok(())
    }

    fn other(&mut self, instr: &mut Instr, name: &str, operands: &Operands) -> Result<(), Fault> {
        let parts: Vec<&str> = name.split('.').collect();
        match (parts[0], name) {
            ("bra", _) => {
                instr.op = Op::Bra;
                self.branches.push((self.code.len(), operands.get(0)?.to_owned()));
            }
            ("ret" | "exit", _) => instr.op = Op::Ret,
            (_, "barrier.sync.aligned" | "barrier.arrive.aligned") if operands.all.len() == 2 => {
                instr.op = if name == "barrier.sync.aligned" { Op::Meet } else { Op::Arrive };
                instr.a = self.operand(operands.get(0)?, Class::R32)?;
                instr.b = self.operand(operands.get(1)?, Class::R32)?;
            }
            (_, "setmaxnreg.inc.sync.aligned.u32" | "setmaxnreg.dec.sync.aligned.u32") => {
                let count = operands.get(0)?;
                instr.op = Op::SetRegisters;
                instr.imm = count.parse().map_err(|_| unsupported(&format!("{name} of {count}")))?;
            }
            (_, "bar.sync" | "barrier.sync.aligned") => {
                if operands.all != ["0"] {
                    return Err(unsupported(&operands.name));
                }
                instr.op = Op::Bar;
            }
            (_, "bar.warp.sync") => {
                instr.op = Op::SyncWarp;
                instr.a = self.operand(operands.get(0)?, Class::R32)?;
            }
            ("mov", "mov.b64") => {
                let (to, from) = (operands.get(0)?.to_owned(), operands.get(1)?.to_owned());
                if to.starts_with('{') {
                    instr.op = Op::Unpack64;
                    let (_, slots) = self.registers(&to)?;
                    instr.a = self.operand(&from, Class::R64)?;
                    (instr.list, instr.count) = self.push_list(&slots);
                } else if from.starts_with('{') {
                    instr.op = Op::Pack64;
                    let (_, slots) = self.sources(&from)?;
                    instr.d = self.operand(&to, Class::R64)?;
                    (instr.a, instr.b) = (slots[0], slots[1]);
                } else {
                    instr.op = Op::Mov64;
                    (instr.d, instr.a) = (self.operand(&to, Class::R64)?, self.operand(&from, Class::R64)?);
                }
            }
            ("ld" | "st", _) => self.memory(instr, &parts, operands)?,
            ("atom", "atom.shared.add.u32" | "atom.shared.add.u64" | "atom.shared.max.u64" | "atom.shared.min.u64") => {
                let what = match parts[2] {
                    "add" => Atomic::Add,
                    "max" => Atomic::Max,
                    _ => Atomic::Min,
                };
                let wide = parts[3] == "u64";
                let of_value = if wide { Class::R64 } else { Class::R32 };
                instr.op = Op::AtomShared { what, wide };
                instr.d = self.operand(operands.get(0)?, of_value)?;
                let (class, slot, offset) = self.address(operands.get(1)?)?;
                if class != Class::R64 {
                    return Err(unsupported(&operands.name));
                }
                (instr.a, instr.imm) = (slot, offset);
                instr.b = self.operand(operands.get(2)?, of_value)?;
            }
            (_, "cp.async.cg.shared.global") => {
                instr.op = Op::CopyAsync;
                let (to, from) = (self.address(operands.get(0)?)?, self.address(operands.get(1)?)?);
                if (to.0, to.2, from.0, from.2) != (Class::R32, 0, Class::R64, 0) || operands.get(2)? != "16" {
                    return Err(unsupported(&operands.name));
                }
                (instr.a, instr.b) = (to.1, from.1);
                instr.c = self.operand(operands.all.get(3).map_or("16", String::as_str), Class::R32)?;
            }
            (_, "cp.async.commit_group") => instr.op = Op::CopyCommit,
            (_, "cp.async.wait_group") => {
                instr.op = Op::CopyWait;
                instr.imm = operands.get(0)?.parse().map_err(|_| unsupported(&operands.name))?;
            }
            (_, "fence.proxy.async.shared::cta" | "fence.proxy.async") => instr.op = Op::FenceProxy,
            ("shfl", _) => {
                instr.op = Op::Shfl(match name {
                    "shfl.sync.bfly.b32" => Shuffle::Bfly,
                    "shfl.sync.up.b32" => Shuffle::Up,
                    "shfl.sync.down.b32" => Shuffle::Down,
                    "shfl.sync.idx.b32" => Shuffle::Idx,
                    _ => return Err(unsupported(&operands.name)),
                });
                let (to, valid) = operands.get(0)?.split_once('|').unwrap_or((operands.get(0)?, ""));
                let (to, valid) = (to.to_owned(), valid.to_owned());
                instr.d = self.operand(&to, Class::R32)?;
                let valid = if valid.is_empty() { NO_GUARD } else { self.operand(&valid, Class::Predicate)? };
                (instr.a, instr.b) = (self.operand(operands.get(1)?, Class::R32)?, self.operand(operands.get(2)?, Class::R32)?);
                instr.c = self.operand(operands.get(3)?, Class::R32)?;
                let members = self.operand(operands.get(4)?, Class::R32)?;
                (instr.list, instr.count) = self.push_list(&[valid, members]);
            }
            (_, "vote.sync.ballot.b32" | "vote.sync.any.pred" | "vote.sync.all.pred") => {
                instr.op = match parts[2] {
                    "ballot" => Op::Ballot,
                    "any" => Op::VoteAny,
                    _ => Op::VoteAll,
                };
                let class = if instr.op == Op::Ballot { Class::R32 } else { Class::Predicate };
                instr.d = self.operand(operands.get(0)?, class)?;
                let from = operands.get(1)?;
                instr.imm = i64::from(from.starts_with('!'));
                instr.a = self.operand(from.trim_start_matches('!'), Class::Predicate)?;
                instr.b = self.operand(operands.get(2)?, Class::R32)?;
            }
            (_, "ldmatrix.sync.aligned.m8n8.x4.shared.b16" | "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16") => {
                instr.op = Op::LoadMatrix { transposed: parts.contains(&"trans") };
                let (_, to) = self.registers(operands.get(0)?)?;
                let (class, slot, offset) = self.address(operands.get(1)?)?;
                if class != Class::R32 {
                    return Err(unsupported(&operands.name));
                }
                (instr.a, instr.imm) = (slot, offset);
                (instr.list, instr.count) = self.push_list(&to);
            }
            (_, "movmatrix.sync.aligned.m8n8.trans.b16") => {
                instr.op = Op::MoveMatrix;
                (instr.d, instr.a) = (self.operand(operands.get(0)?, Class::R32)?, self.operand(operands.get(1)?, Class::R32)?);
            }
            (_, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") => {
                instr.op = Op::Mma;
                let mut slots = Vec::new();
                for i in 0..4 {
                    slots.extend(self.sources(operands.get(i)?)?.1);
                }
                if slots.len() != 4 + 4 + 2 + 4 {
                    return Err(unsupported(&operands.name));
                }
                (instr.list, instr.count) = self.push_list(&slots);
            }
            (_, "wgmma.fence.sync.aligned") => instr.op = Op::WgmmaFence,
            (_, "wgmma.commit_group.sync.aligned") => instr.op = Op::WgmmaCommit,
            (_, "wgmma.wait_group.sync.aligned") => {
                instr.op = Op::WgmmaWait;
                instr.imm = operands.get(0)?.parse().map_err(|_| unsupported(&operands.name))?;
            }
            ("wgmma", _) => self.wgmma(instr, name, operands)?,
            _ => return Err(unsupported(&operands.name)),
        }
        Ok(())
    }

    fn memory(&mut self, instr: &mut Instr, parts: &[&str], operands: &Operands) -> Result<(), Fault> {
        let (mut space, mut vector, mut element) = (Space::Generic, 1, 0);
        for &part in &parts[1..] {
            match part {
                "global" => space = Space::Global,
                "shared" => space = Space::Shared,
                "param" => space = Space::Param,
                // These are hints for caches. `nc` promises that no thread writes, which the race checks cover.
                "nc" | "cs" | "ca" | "cg" => {}
                "v2" => vector = 2,
                "v4" => vector = 4,
                _ => element = size_of_type(part).map_err(|_| unsupported(&operands.name))?,
            }
        }
        let load = parts[0] == "ld";
        let (numbers, address) = if load { (0, 1) } else { (1, 0) };
        let (class, slots) = if load { self.registers(operands.get(numbers)?)? } else { self.sources(operands.get(numbers)?)? };
        let (address_class, slot, offset) = self.address(operands.get(address)?)?;
        if slots.len() != vector || class == Class::Predicate || (space == Space::Shared && element < 4) {
            return Err(unsupported(&operands.name));
        }
        let access = Access { space, element: element as u8, wide: class == Class::R64, wide_address: address_class == Class::R64 };
        instr.op = if load { Op::Load(access) } else { Op::Store(access) };
        (instr.a, instr.imm) = (slot, offset);
        (instr.list, instr.count) = self.push_list(&slots);
        Ok(())
    }

    /// `wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 d, a, b, scale-d, imm-scale-a, imm-scale-b[, imm-trans-a],
    /// imm-trans-b`; a in registers has no transposition.
    fn wgmma(&mut self, instr: &mut Instr, name: &str, operands: &Operands) -> Result<(), Fault> {
        let shape = name.strip_prefix("wgmma.mma_async.sync.aligned.m64n").and_then(|n| n.strip_suffix("k16.f32.bf16.bf16"));
        let columns: u16 = shape.and_then(|n| n.parse().ok()).ok_or_else(|| unsupported(name))?;
        let a_shared = !operands.get(1)?.starts_with('{');
        let signs = (operands.get(4)?, operands.get(5)?);
        let (trans_a, trans_b) = if a_shared { (operands.get(6)?, operands.get(7)?) } else { ("0", operands.get(6)?) };
        let (_, d) = self.registers(operands.get(0)?)?;
        if signs != ("1", "1") || trans_a != "0" || d.len() != usize::from(columns) / 2 || !columns.is_multiple_of(8) {
            return Err(unsupported(name));
        }
        instr.op = Op::Wgmma { columns, a_shared, b_transposed: trans_b == "1" };
        let mut slots = d;
        if a_shared {
            instr.a = self.operand(operands.get(1)?, Class::R64)?;
        } else {
            let (_, a) = self.registers(operands.get(1)?)?;
            if a.len() != 4 {
                return Err(unsupported(name));
            }
            slots.extend(a);
        }
        instr.b = self.operand(operands.get(2)?, Class::R64)?;
        instr.c = self.operand(operands.get(3)?, Class::Predicate)?;
        (instr.list, instr.count) = self.push_list(&slots);
        Ok(())
    }
}

fn special(text: &str) -> Option<Special> {
    Some(match text {
        "%tid.x" => Special::TidX,
        "%tid.y" => Special::TidY,
        "%tid.z" => Special::TidZ,
        "%ntid.x" => Special::NtidX,
        "%ntid.y" => Special::NtidY,
        "%ntid.z" => Special::NtidZ,
        "%ctaid.x" => Special::CtaX,
        "%ctaid.y" => Special::CtaY,
        "%ctaid.z" => Special::CtaZ,
        "%nctaid.x" => Special::NctaX,
        "%nctaid.y" => Special::NctaY,
        "%nctaid.z" => Special::NctaZ,
        "%laneid" => Special::Lane,
        _ => return None,
    })
}

/// Integers, and floats as `0f` or `0d` and their bits.
fn immediate(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(u64::from);
    }
    if let Some(bits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok();
    }
    text.parse::<i64>().map(|x| x as u64).or_else(|_| text.parse::<u64>()).ok()
}

/// The operation of an instruction that only computes, and a letter per operand: a 32-bit register (r), a long one (l), a predicate (p).
#[rustfmt::skip]
fn plain(name: &str) -> Option<(Op, &'static str)> {
    use Op::*;
    Some(match name {
        "mov.u32" | "mov.b32" | "mov.f32" | "mov.s32" | "mov.u16" | "mov.b16" => (Mov32, "rr"),
        "mov.u64" | "mov.f64" | "mov.s64" | "cvta.to.global.u64" | "cvta.global.u64" => (Mov64, "ll"),
        "mov.pred" => (MovP, "pp"),
        "add.s32" | "add.u32" => (Add32, "rrr"), "sub.s32" | "sub.u32" => (Sub32, "rrr"),
        "mul.lo.s32" | "mul.lo.u32" => (Mul32, "rrr"), "mad.lo.s32" | "mad.lo.u32" => (Mad32, "rrrr"),
        "and.b32" => (And32, "rrr"), "or.b32" => (Or32, "rrr"), "xor.b32" => (Xor32, "rrr"), "not.b32" => (Not32, "rr"),
        "neg.s32" => (Neg32, "rr"), "shl.b32" => (Shl32, "rrr"), "shr.u32" | "shr.b32" => (ShrU32, "rrr"), "shr.s32" => (ShrS32, "rrr"),
        "min.u32" => (MinU32, "rrr"), "max.u32" => (MaxU32, "rrr"), "min.s32" => (MinS32, "rrr"), "max.s32" => (MaxS32, "rrr"),
        "div.u32" => (DivU32, "rrr"), "rem.u32" => (RemU32, "rrr"), "prmt.b32" => (Prmt, "rrrr"), "brev.b32" => (Brev32, "rr"),
        "bfind.shiftamt.u32" => (BfindShift32, "rr"), "bfi.b32" => (Bfi32, "rrrrr"), "popc.b32" => (Popc32, "rr"),
        "selp.b32" | "selp.f32" | "selp.u32" | "selp.s32" => (Sel32, "rrrp"),
        "sub.s16" | "sub.u16" => (Sub16, "rrr"), "add.s16" | "add.u16" => (Add16, "rrr"), "shl.b16" => (Shl16, "rrr"), "shr.u16" => (Shr16, "rrr"),
        "mul.lo.s16" | "mul.lo.u16" => (Mul16, "rrr"), "mul.wide.u16" => (MulWide16, "rrr"),
        "cvt.u16.u32" | "cvt.u32.u16" => (CvtU16U32, "rr"),
        "add.f32" | "add.rn.f32" => (AddF32, "rrr"), "sub.f32" | "sub.rn.f32" => (SubF32, "rrr"), "mul.f32" | "mul.rn.f32" => (MulF32, "rrr"),
        "div.rn.f32" => (DivF32, "rrr"), "fma.rn.f32" => (FmaF32, "rrrr"), "max.f32" => (MaxF32, "rrr"), "min.f32" => (MinF32, "rrr"),
        "abs.f32" => (AbsF32, "rr"), "neg.f32" => (NegF32, "rr"), "rcp.rn.f32" | "rcp.approx.ftz.f32" => (RcpF32, "rr"), "rsqrt.approx.f32" => (RsqrtF32, "rr"),
        "cvt.rzi.f32.f32" => (TruncF32, "rr"), "copysign.f32" => (CopysignF32, "rrr"),
        "sqrt.rn.f32" => (SqrtF32, "rr"), "ex2.approx.f32" => (Ex2F32, "rr"), "ex2.approx.ftz.f32" => (Ex2FtzF32, "rr"),
        "cvt.rn.f32.u32" => (CvtF32U32, "rr"), "cvt.rn.f32.s32" => (CvtF32S32, "rr"), "cvt.rzi.u32.f32" => (CvtU32F32Rz, "rr"),
        "cvt.rni.s32.f32" => (CvtS32F32Rn, "rr"), "cvt.rn.bf16x2.f32" => (CvtBf16x2, "rrr"), "fma.rn.bf16x2" => (FmaBf16x2, "rrrr"),
        "add.s64" | "add.u64" => (Add64, "lll"), "sub.s64" | "sub.u64" => (Sub64, "lll"), "mul.lo.s64" | "mul.lo.u64" => (Mul64, "lll"),
        "mul.hi.u64" => (MulHi64, "lll"), "and.b64" => (And64, "lll"), "or.b64" => (Or64, "lll"), "xor.b64" => (Xor64, "lll"),
        "not.b64" => (Not64, "ll"), "shl.b64" => (Shl64, "llr"), "shr.u64" | "shr.b64" => (ShrU64, "llr"),
        "min.u64" => (MinU64, "lll"), "max.u64" => (MaxU64, "lll"), "div.u64" => (DivU64, "lll"), "rem.u64" => (RemU64, "lll"),
        "bfi.b64" => (Bfi64, "lllrr"), "selp.b64" | "selp.u64" | "selp.s64" | "selp.f64" => (Sel64, "lllp"),
        "mul.f64" | "mul.rn.f64" => (MulF64, "lll"), "cvt.rpi.f64.f64" => (CeilF64, "ll"), "cvt.rzi.u64.f64" => (CvtU64F64Rz, "ll"),
        "mul.wide.u32" => (MulWideU32, "lrr"), "mul.wide.s32" => (MulWideS32, "lrr"), "cvt.u64.u32" => (CvtU64U32, "lr"),
        "cvt.s64.s32" => (CvtS64S32, "lr"), "cvt.u32.u64" => (CvtU32U64, "rl"), "cvt.u64.u16" => (CvtU64U16, "lr"),
        "cvt.f64.f32" => (CvtF64F32, "lr"), "cvt.rn.f64.u64" => (CvtF64U64, "ll"), "cvt.rni.u64.f32" => (CvtU64F32Rn, "lr"),
        "setp.eq.s32" | "setp.eq.u32" | "setp.eq.b32" => (EqU32, "prr"), "setp.ne.s32" | "setp.ne.u32" | "setp.ne.b32" => (NeU32, "prr"),
        "setp.lt.u32" => (LtU32, "prr"), "setp.le.u32" => (LeU32, "prr"), "setp.gt.u32" => (GtU32, "prr"), "setp.ge.u32" => (GeU32, "prr"),
        "setp.lt.s32" => (LtS32, "prr"), "setp.le.s32" => (LeS32, "prr"), "setp.gt.s32" => (GtS32, "prr"), "setp.ge.s32" => (GeS32, "prr"),
        "setp.eq.s64" | "setp.eq.u64" | "setp.eq.b64" => (EqU64, "pll"), "setp.ne.s64" | "setp.ne.u64" | "setp.ne.b64" => (NeU64, "pll"),
        "setp.lt.u64" => (LtU64, "pll"), "setp.le.u64" => (LeU64, "pll"), "setp.gt.u64" => (GtU64, "pll"), "setp.ge.u64" => (GeU64, "pll"),
        "setp.lt.s64" => (LtS64, "pll"), "setp.le.s64" => (LeS64, "pll"), "setp.gt.s64" => (GtS64, "pll"), "setp.ge.s64" => (GeS64, "pll"),
        "setp.eq.f32" => (EqF32, "prr"), "setp.ne.f32" => (NeF32, "prr"), "setp.lt.f32" => (LtF32, "prr"), "setp.le.f32" => (LeF32, "prr"),
        "setp.gt.f32" => (GtF32, "prr"), "setp.ge.f32" => (GeF32, "prr"), "setp.equ.f32" => (EquF32, "prr"), "setp.neu.f32" => (NeuF32, "prr"),
        "setp.ltu.f32" => (LtuF32, "prr"), "setp.leu.f32" => (LeuF32, "prr"), "setp.gtu.f32" => (GtuF32, "prr"), "setp.geu.f32" => (GeuF32, "prr"),
        "and.pred" => (AndP, "ppp"), "or.pred" => (OrP, "ppp"), "xor.pred" => (XorP, "ppp"), "not.pred" => (NotP, "pp"),
        _ => return None,
    })
}
