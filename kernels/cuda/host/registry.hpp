// Instances by name.
#pragma once
#include "../gemv.cuh"

#include <map>
#include <string>

template <class A> using Instance = void (*)(const A&);
template <class A> std::map<std::string, Instance<A>>& instances() {
    static std::map<std::string, Instance<A>> all;
    return all;
}
template <class A> bool add(const char* name, Instance<A> run) {
    return instances<A>().emplace(name, run).second;
}
inline bool add(const char* name, void (*run)(const GemvArgs&)) { return add<GemvArgs>(name, run); }
inline bool add(const char* name, void (*run)(const DequantArgs&)) { return add<DequantArgs>(name, run); }
